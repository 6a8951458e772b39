"""Installing on machines that lack things: no compiler, no nvcc, no GPU. All offline, with the build backend itself."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core", reason="scikit-build-core (dev extra) is not installed")

ROOT = Path(__file__).parents[1]
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # wheels bring cmake and ninja too
CMAKE = shutil.which("cmake", path=TOOLS)
pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake")

USE = """
import sys, warnings
warnings.simplefilter("always")
import torch
from nf4linear import native, ops, reference, reorder
from nf4linear.formats import FourBitSpec
spec = FourBitSpec("nf4", 32, 128)
canonical = reference.quantize(spec, torch.randn(32, 128))
packed = reorder.pack(spec, canonical)
names = ("qweight", "absmax_q", "nested_code", "nested_absmax", "nested_offset")
arguments = [packed[name] for name in names]
for _ in range(2):
    got = ops.dequantize(*arguments, "nf4", 32, 128, 64, torch.float32)
assert torch.equal(got, reference.dequantize(spec, canonical, torch.float32))
print(reference.__file__)
print(bool(native.library("cpu")))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The sources alone, without anything built in the checkout."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    for name in ("cmake", "csrc", "nf4linear"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    return tree


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, str]:
    """An environment whose PATH holds cmake and ninja, and neither a C++ compiler nor nvcc."""
    folder = tmp_path_factory.mktemp("bare")
    for tool in ("cmake", "ninja", "make"):
        if found := shutil.which(tool, path=TOOLS):
            (folder / tool).symlink_to(found)
    return environment(PATH=str(folder))


def environment(**changes: str) -> dict[str, str]:
    dropped = ("CXX", "CC", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "NF4LINEAR_CUDA_ARCHS", "CMAKE_ARGS")
    dropped += ("NF4LINEAR_LIBRARY_PATH", "PYTHONSAFEPATH")
    return {name: value for name, value in os.environ.items() if name not in dropped} | changes


def backend(call: str, cwd: Path, env: dict[str, str], output: Path) -> tuple[Path, str]:
    """Calls a hook of the build backend in `cwd`, as pip does; returns what it built and what it said."""
    output.mkdir(exist_ok=True)
    program = f"from scikit_build_core import build\nprint('built:' + build.{call}({str(output)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return output / done.stdout.rsplit("built:", 1)[1].strip(), done.stdout


def use(code: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Runs USE with the wheel's files on the path (site.addsitedir: an editable wheel works through a .pth file)."""
    program = f"import site, sys\nsite.addsitedir({str(folder)!r})\n" + code
    return subprocess.run([sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True)


def said_once(text: str, words: str) -> bool:
    """One line of the output, and only one, holds `words`."""
    return sum(words in line for line in text.splitlines()) == 1


def test_wheel_from_sdist_without_any_compiler(tree, bare, tmp_path):
    sdist, _ = backend("build_sdist", tree, bare, tmp_path / "sdist")
    shutil.unpack_archive(sdist, tmp_path)
    wheel, said = backend("build_wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), bare, tmp_path / "wheel")
    assert said_once(said, "nf4linear: no C++ compiler found"), said
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "nf4linear/ops.py" in names and not [name for name in names if name.endswith((".so", ".cu", ".h"))]
    entry_points = next(tmp_path.glob("site/*.dist-info/entry_points.txt")).read_text()
    assert "nf4linear = nf4linear.cli.main:app" in entry_points

    done = use(USE, tmp_path / "site", bare)
    assert done.returncode == 0, done.stderr
    location, has_library = done.stdout.split()
    assert location.startswith(str(tmp_path)) and has_library == "False"
    assert said_once(done.stderr, "slower torch path"), done.stderr


def test_editable_without_any_compiler(tree, bare, tmp_path):
    wheel, _ = backend("build_editable", tree, bare, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    done = use(USE, tmp_path / "site", bare)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(tree / "nf4linear" / "reference.py")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_wheel_with_the_cpu_library(tree, tmp_path):
    # Unoptimised: this is about what goes into the wheel, and about a compiler being found at all.
    env = environment(NF4LINEAR_CUDA_ARCHS="none", SKBUILD_CMAKE_BUILD_TYPE="Debug")
    wheel, _ = backend("build_wheel", tree, env, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        assert "nf4linear/lib/libnf4linear_cpu.so" in archive.namelist()
        assert not [name for name in archive.namelist() if "cuda" in name]
        archive.extractall(tmp_path / "site")
    done = use(USE, tmp_path / "site", env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "True" and "torch path" not in done.stderr
    if nm := shutil.which("nm"):
        library = tmp_path / "site" / "nf4linear" / "lib" / "libnf4linear_cpu.so"
        names = subprocess.run([nm, "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
        assert names and all(line.split()[2].startswith("nf4l_cpu_") for line in names.splitlines()), names


# ---- what CMake finds ------------------------------------------------------------------------------------------------


def configure(tree: Path, build: Path, env: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    command = [CMAKE, "-S", str(tree), "-B", str(build), *options]
    return subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None or shutil.which("c++") is None, reason="no nvcc or no C++ compiler"
)


@needs_nvcc
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_no_gpu_and_no_architectures(tree, tmp_path):
    done = configure(tree, tmp_path, environment())
    assert done.returncode == 0, done.stdout
    assert said_once(done.stdout, "nf4linear: no GPU found") and "NF4LINEAR_CUDA_ARCHS" in done.stdout
    assert "nf4linear: CUDA library" not in done.stdout


@needs_nvcc
def test_architectures_from_the_environment(tree, tmp_path):
    done = configure(tree, tmp_path, environment(NF4LINEAR_CUDA_ARCHS="90a;80"))
    assert "nf4linear: CUDA library for 90a,80" in done.stdout, done.stdout
    # They hold when the build system configures again by itself, and another choice replaces them.
    assert "nf4linear: CUDA library for 90a,80" in configure(tree, tmp_path, environment()).stdout
    again = configure(tree, tmp_path, environment(NF4LINEAR_CUDA_ARCHS="89, 120"))
    assert "nf4linear: CUDA library for 89,120" in again.stdout


@needs_nvcc
def test_a_wrong_architecture_is_named(tree, tmp_path):
    done = configure(tree, tmp_path, environment(NF4LINEAR_CUDA_ARCHS="sm_90"))
    assert done.returncode != 0 and "holds 'sm_90'" in done.stdout


@needs_nvcc
def test_a_machine_with_gpus(tree, tmp_path):
    """nvidia-smi says which; Hopper gets the architecture with its own instructions."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nprintf '8.6\\n9.0\\n9.0\\n'\n")
    (tools / "nvidia-smi").chmod(0o755)
    done = configure(tree, tmp_path / "build", environment(PATH=f"{tools}:{os.environ['PATH']}"))
    assert "nf4linear: CUDA library for 86,90a" in done.stdout, done.stdout


def test_a_compiler_but_no_nvcc(tree, tmp_path):
    """CUDACXX names the nvcc to use; one that does not work leaves a clear stop, not half a library."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    env = environment(CUDACXX="/nonexistent/nvcc", NF4LINEAR_CUDA_ARCHS="80")
    done = configure(tree, tmp_path, env)
    assert done.returncode != 0 and "/nonexistent/nvcc" in done.stdout

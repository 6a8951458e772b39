"""The machine code of the prefill kernels, read without a GPU: asynchronous wgmma, no spills, cheap look-ups."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from test_sass import CSRC, CUOBJDUMP, NVCC, NVDISASM, functions, run
from test_sass_small_wgmma import opcodes

pytestmark = pytest.mark.skipif(
    not (NVCC and CUOBJDUMP and NVDISASM and shutil.which("c++")),
    reason="needs nvcc, a C++ compiler, cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)",
)
SHAPES = 4  # GEMM_SHAPES in csrc/gemm_wgmma_plan.h


@pytest.fixture(scope="module", params=["f16", "bf16"])
def build(request, tmp_path_factory) -> tuple[Path, str]:
    """The compiled kernels, and what ptxas said about them."""
    path = tmp_path_factory.mktemp("sass") / f"{request.param}.cubin"
    flags = ["-cubin", "-arch=sm_90a", "-O3", "-std=c++17", "-Xptxas=-v", f"-I{CSRC}"]
    command = [NVCC, *flags, str(CSRC / f"inst_gemm_wgmma_{request.param}.cu"), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return path, done.stderr


def test_ptxas_keeps_wgmma_asynchronous(build):
    """It says C75xx where it serialises wgmma or ignores setmaxnreg, and goes on."""
    _, said = build
    assert said.count("Compiling entry function") == SHAPES
    assert not re.findall(r"\(C75\d\d\)|setmaxnreg", said), said
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == SHAPES


def test_a_k_tile_is_four_steps_of_wgmma_and_look_ups(build):
    cubin, _ = build
    kernels = {name: code for name, code in functions(cubin).items() if "gemm_wgmma_kernel" in name}
    assert len(kernels) == SHAPES
    for name, code in kernels.items():
        found = opcodes(code)
        count = {op: sum(o.split(".")[0] == op for o in found) for op in {o.split(".")[0] for o in found}}
        assert "LDL" not in count and "STL" not in count, name
        assert count["HGMMA"] == 4, name
        # Those of the loop and of the first steps in front of it; each one PRMT and one load.
        look_ups = 4 * (4 + 3)
        assert look_ups <= count["PRMT"] <= look_ups + 32, (name, count["PRMT"])
        assert look_ups <= sum(o.startswith("LDS.64") for o in found) <= look_ups + 8, name
        # x and codes come by the copy engine, each at once; registers change hands; the kernel before is waited for.
        assert count["UTMALDG"] >= 2, (name, count)
        assert count["USETMAXREG"] == 2 and count["ACQBULK"] == 2 and count["PREEXIT"] == 1, name


def test_other_architectures_get_nothing(tmp_path):
    path = tmp_path / "sm_80.cubin"
    flags = ["-cubin", "-arch=sm_80", "-O3", "-std=c++17", f"-I{CSRC}"]
    subprocess.run([NVCC, *flags, str(CSRC / "inst_gemm_wgmma_bf16.cu"), "-o", str(path)], check=True)
    usage = run(CUOBJDUMP, "-res-usage", str(path))
    assert len(re.findall(r"Function \S+:", usage)) == SHAPES
    for name, code in functions(path).items():
        assert len(opcodes(code)) < 40, name

"""The small-batch kernel itself on the CPU, without a GPU: csrc/small_batch.cuh compiled for the host.

tests/emulate/ stands in for CUDA: threads are fibers, warp instructions exchange values between them, and the two
headers that wrap PTX (copy.cuh, mma_sm80.cuh) are replaced. All the rest is the product's code, so indices, ragged
ends, shards, slices and sums are checked against a float64 product made by layout.h's maps, and reads outside of a
tensor are caught. Timing, races and the instructions themselves are left to the GPU tests.
"""

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

EMULATE = Path(__file__).parent / "emulate"
CSRC = Path(__file__).parents[1] / "csrc"
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

# (row tiles, tokens) of SMALL_BATCH_SHAPES in csrc/small_batch_plan.h.
SHAPES = [tuple(map(int, s)) for s in re.findall(r"\{(\d+), (\d+), \d+\}", (CSRC / "small_batch_plan.h").read_text())]
# n, k, blocksize: fewer tiles than a burst, ragged bursts, ragged rows, repeated scales.
SIZES = ((48, 192, 64), (5, 64, 64), (100, 576, 64), (33, 1088, 64), (200, 640, 128), (70, 1024, 1024))


def compile_kernel(
    folder: Path, changes: dict[str, tuple[str, str]] | None = None, name: str = "small_batch", defines: tuple = ()
) -> Path:
    """A test program, from a copy of csrc in which `changes` (file -> old, new text) are made first."""
    for source in (*CSRC.glob("*.h"), *CSRC.glob("*.cuh"), *EMULATE.iterdir()):
        shutil.copy(source, folder)
    for file, (old, new) in (changes or {}).items():
        text = (folder / file).read_text()
        assert old in text, (file, old)
        (folder / file).write_text(text.replace(old, new))
    program = folder / name
    flags = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", f"-I{folder}", *defines]
    subprocess.run([COMPILER, *flags, str(folder / f"{name}.cpp"), "-o", str(program)], check=True)
    return program


def random_cases(count: int, seed: int) -> list[str]:
    """Lines for the program: every compiled shape and size, one slice and several, whole weights and shards."""
    draw = random.Random(seed)
    cases = []
    for index in range(count):
        shape = index % len(SHAPES)
        n, k, blocksize = draw.choice(SIZES)
        most = SHAPES[shape][1]
        tokens = draw.choice((1, most // 2 + 1, most))
        n0, kb0, kb_full = 0, 0, k // 64
        if blocksize == 64 and draw.random() < 0.3:
            n0, kb0, kb_full = draw.randrange(500), draw.randrange(30), kb_full + draw.randrange(30, 90)
        nested, fp4, half, bias = draw.random() < 0.7, draw.randrange(2), draw.randrange(2), draw.randrange(2)
        slices, sms = draw.choice((1, 1, 2, 3, 5)), draw.choice((1, 2, 3, 8, 16))
        case = (n, k, blocksize, int(nested), n0, kb0, kb_full, fp4, half, tokens, shape, slices, sms, bias)
        cases.append(" ".join(map(str, case)))
    return cases


def run(program: Path, cases: list[str]) -> list[str]:
    done = subprocess.run([program], input="\n".join(cases) + "\n", capture_output=True, text=True)
    return done.stdout.splitlines()


def check(program: Path, cases: list[str]) -> None:
    """Every case is right."""
    results = run(program, cases)
    wrong = [f"{case}: {result}" for case, result in zip(cases, results, strict=False) if result != "ok"]
    assert not wrong and len(results) == len(cases), wrong


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return compile_kernel(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_on_the_cpu(program, seed):
    check(program, random_cases(35, seed))


@pytest.mark.parametrize(
    "change",
    [
        # Reads the activations of tiles that do not exist, so beyond the end of x.
        ("small_batch_load.cuh", "exists && tile < work.tiles", "exists"),
        # The last slice is left out.
        ("small_batch.cuh", "first + j < slices ?", "first + j < slices - 1 ?"),
    ],
    ids=lambda change: change[2],
)
def test_the_check_can_fail(tmp_path, change):
    name, old, new = change
    program = compile_kernel(tmp_path, {name: (old, new)})
    cases = random_cases(35, 0)
    assert run(program, cases) != ["ok"] * len(cases)


def test_every_product_is_exact(tmp_path):
    done = subprocess.run([compile_kernel(tmp_path, name="product_table")], capture_output=True, text=True, check=True)
    assert done.stdout == f"{500 * 4 * 128 * 8} right\n"


@pytest.mark.parametrize(
    "change", [("0xeac8", "0xeac9"), ("0x4431", "0x4413"), ("0x6273", "0x4273"), (" ^ low[1]", "")]
)
def test_a_wrong_product_is_found(tmp_path, change):
    program = compile_kernel(tmp_path, {"product_table.cuh": change}, "product_table")
    assert "bf16 nf4: " in subprocess.run([program], capture_output=True, text=True, check=True).stdout

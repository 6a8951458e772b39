"""The machine code of the small-batch kernels on every architecture, read without a GPU: no spills, wide loads, tensor
cores, one PRMT and one shared load a look-up."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from test_sass import CSRC, CUOBJDUMP, NVCC, NVDISASM, opcodes, run

pytestmark = pytest.mark.skipif(
    not (NVCC and CUOBJDUMP and NVDISASM and shutil.which("c++")),
    reason="needs nvcc, a C++ compiler, cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)",
)
ARCHITECTURES = ("80", "86", "89", "90a", "100", "120")
ROW_TILES, TOKENS = 2, 8
ONE_KERNEL = f"""
#include "small_batch.cuh"
template __global__ void nf4l::small_batch_kernel<__nv_bfloat16, {ROW_TILES}, {TOKENS}, 8>(
    const __grid_constant__ nf4l::SmallBatchArgs);
"""


def compile_cubin(source: Path, arch: str, folder: Path) -> Path:
    path = folder / f"{source.stem}-{arch}.cubin"
    flags = ["-cubin", f"-arch=sm_{arch}", "-O3", "-std=c++17", f"-I{CSRC}"]
    subprocess.run([NVCC, *flags, str(source), "-o", str(path)], check=True)
    return path


def assert_nothing_spills(cubin: Path) -> int:
    """Number of kernels in it; each keeps its registers, and its block fits on an SM."""
    usage = run(CUOBJDUMP, "-res-usage", str(cubin))
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    for name, registers, stack, local in found:
        assert (int(stack), int(local)) == (0, 0), name
        assert int(registers) <= 255, name
    return len(found)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def one(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("sass")
    (folder / "one.cu").write_text(ONE_KERNEL)
    return request.param, compile_cubin(folder / "one.cu", request.param, folder)


def opcodes_of(cubin: Path) -> list[str]:
    lines = opcodes(run(NVDISASM, "-c", str(cubin)))
    assert len(lines) > 500
    return lines


def count(instructions: list[str], pattern: str) -> int:
    return sum(re.fullmatch(pattern, instruction) is not None for instruction in instructions)


def test_one_kernel_on_every_architecture(one):
    arch, cubin = one
    assert assert_nothing_spills(cubin) == 1
    code = opcodes_of(cubin)
    assert count(code, r"(LDL|STL).*") == 0
    # The loop is two bursts of four tiles for each row tile.
    tiles = 2 * 4 * ROW_TILES
    assert count(code, r"LDG\.E\.\S*128\S*") >= tiles
    assert count(code, r"HMMA\.16816\S*") == 4 * tiles
    # 16 look-ups a tile, each one PRMT and one 4-byte load.
    assert tiles * 16 <= count(code, r"LDS") <= tiles * 16 + 64
    assert count(code, r"PRMT") <= tiles * 16 + 40
    # Only Hopper and later can wait for the kernel before.
    assert (count(code, r"ACQBULK|PREEXIT") == 2) == (int(arch.rstrip("a")) >= 90)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "arch"), [("f16", "90a"), *(("bf16", arch) for arch in ARCHITECTURES)])
def test_every_kernel_of_the_build(dtype, arch, tmp_path):
    shapes = re.findall(r"\{\d+, \d+, 8\}", (CSRC / "small_batch_plan.h").read_text())
    assert len(shapes) >= 7
    cubin = compile_cubin(CSRC / f"inst_small_batch_{dtype}.cu", arch, tmp_path)
    assert assert_nothing_spills(cubin) == len(shapes)
    assert count(opcodes_of(cubin), r"(LDL|STL).*") == 0

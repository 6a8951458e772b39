"""The machine code of the mma.sync prefill kernels, read without a GPU: no spills, and a k tile whose instructions are
those that the engine's story counts."""

import re
import shutil
from pathlib import Path

import pytest

from test_sass import CSRC, CUOBJDUMP, NVCC, NVDISASM, functions
from test_sass import opcodes as opcodes_in
from test_sass_small_batch import assert_nothing_spills, compile_cubin, count

pytestmark = pytest.mark.skipif(
    not (NVCC and CUOBJDUMP and NVDISASM and shutil.which("c++")),
    reason="needs nvcc, a C++ compiler, cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)",
)
ARCHITECTURES = ("80", "86", "89", "120")
SHAPES = re.findall(r"\{(\d+), \d+\}", (CSRC / "gemm_mma_plan.h").read_text())


@pytest.fixture(scope="module", params=ARCHITECTURES)
def cubin(request, tmp_path_factory) -> Path:
    return compile_cubin(CSRC / "inst_gemm_mma_bf16.cu", request.param, tmp_path_factory.mktemp("sass"))


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_a_k_tile(cubin, shape):
    (code,) = (text for name, text in functions(cubin).items() if f"Li{shape}E" in name)
    code = opcodes_in(code)
    tokens = int(SHAPES[shape])
    # Four steps of k16, two row tiles: one mma for each eight tokens, one ldmatrix for each sixteen.
    assert count(code, r"HMMA\.16816\S*") == 4 * 2 * tokens // 8
    assert count(code, r"LDSM\S*") == 4 * tokens // 16
    assert count(code, r"LDGSTS\S*128\S*") >= 2 + tokens // 16
    # The loop holds all it needs in registers, and on GPUs whose compiler leaves some free so does the rest.
    hmma = [i for i, instruction in enumerate(code) if instruction.startswith("HMMA")]
    assert count(code[hmma[0] : hmma[-1]], r"(LDL|STL)\S*") == 0
    # Eight words of codes, 14 PRMT each, and those that make two tables.
    assert 8 * 14 <= count(code, r"PRMT\S*") <= 8 * 14 + 2 * 8 + 120


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f16", marks=pytest.mark.slow)])
def test_nothing_spills(dtype, tmp_path):
    cubin = compile_cubin(CSRC / f"inst_gemm_mma_{dtype}.cu", "80", tmp_path)
    assert assert_nothing_spills(cubin) == len(SHAPES)

"""The machine code of the kernels for 8-bit weights, read without a GPU: no spills, bulk copies where an engine
makes them, tensor cores, and few instructions a conversion."""

import re
from collections import Counter

import pytest

from nf4linear.bench.linear_w8 import TUNE_GEMM_SHAPES, TUNE_WGMMA_SHAPES
from sass_wgmma import assert_asynchronous, assert_nothing_for_sm_80, compile_for
from test_sass import CSRC, NVDISASM, functions, opcodes, run
from test_sass_small_batch import ARCHITECTURES, assert_nothing_spills, compile_cubin, count, opcodes_of, pytestmark

assert pytestmark  # the same tools are needed here
KINDS = [(code, dtype) for code in ("W8S8", "W8U8") for dtype in ("__half", "__nv_bfloat16")]
ROW_TILES, TOKENS = 1, 8
ONE_KERNEL = f"""
#include "small_w8.cuh"
template __global__ void nf4l::small_w8_kernel<nf4l::W8S8, __nv_bfloat16, {ROW_TILES}, {TOKENS}, 8, true>(
    const __grid_constant__ nf4l::SmallW8Args);
"""
CONVERSION = """
#include "convert8.cuh"
extern "C" __global__ void convert(const uint32_t* in, uint32_t* out) {{
#pragma unroll
  for (int i = 0; i < 16; ++i) {{
    const uint32_t word = in[i * 32 + threadIdx.x];
    for (int p = 0; p < 2; ++p) {{
      out[(2 * i + p) * 32 + threadIdx.x] = nf4l::Convert8<{dtype}>::pair_of<nf4l::{code}>(word, p);
    }}
  }}
}}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_one_kernel_on_every_architecture(arch, tmp_path):
    (tmp_path / "one.cu").write_text(ONE_KERNEL)
    cubin = compile_cubin(tmp_path / "one.cu", arch, tmp_path)
    assert assert_nothing_spills(cubin) == 1
    code = opcodes_of(cubin)
    # The loop is one burst of four tiles; a tile is two 16-byte reads a lane and four products.
    assert count(code, r"HMMA\.16816\S*") == 4 * 4 * ROW_TILES
    assert count(code, r"LDS\.128") >= 2 * 4 * ROW_TILES
    hopper_or_later = int(arch.rstrip("a")) >= 90
    assert (count(code, r"UBLKCP\S*") > 0) == hopper_or_later
    assert (count(code, r"ACQBULK|PREEXIT") == 2) == hopper_or_later


@pytest.mark.parametrize(("code", "dtype"), KINDS)
def test_instructions_of_a_conversion(code, dtype, tmp_path):
    """For a pair: fp16 a PRMT and a subtract; bf16 a subtract, and three integer instructions."""
    (tmp_path / "convert.cu").write_text(CONVERSION.format(code=code, dtype=dtype))
    listing = run(NVDISASM, "-c", str(compile_cubin(tmp_path / "convert.cu", "90a", tmp_path)))
    counts = opcodes(listing)
    pairs = 32
    half = dtype == "__half"
    integer = count(counts, r"PRMT") + count(counts, r"LOP3\S*")
    assert pairs <= integer <= pairs * (1 if half else 3) + 8
    assert count(counts, r"(HADD2|HFMA2|HMUL2)\S*") <= pairs + 8


def count_of(kernel: str) -> Counter[str]:
    return Counter(op.split(".")[0] for op in opcodes(kernel))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_wgmma_engine(dtype, tmp_path):
    cubin, said = compile_for("90a", f"inst_small_wgmma_w8_{dtype}.cu", tmp_path)
    assert_asynchronous(said, 4 * len(TUNE_WGMMA_SHAPES))  # both kinds of codes and of scales
    bursts = Counter()
    for name, code in functions(cubin).items():
        count = count_of(code)
        bursts[count["HGMMA"] // 4] += 1
        # Codes by bulk copies, x and group scales by boxes, weights before the kernel in front has ended.
        assert count["UBLKCP"] >= 1 and count["UTMALDG"] >= 1 and count["USETMAXREG"] == 2, name
        assert count["ACQBULK"] == 2 and count["PREEXIT"] == 1, name
    assert bursts == Counter({b: 4 * n for b, n in Counter(burst for *_, burst in TUNE_WGMMA_SHAPES).items()})


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("code", ["s8", "u8"])
def test_the_prefill_engine(code, dtype, tmp_path):
    cubin, said = compile_for("90a", f"inst_gemm_w8_{code}_{dtype}.cu", tmp_path)
    assert_asynchronous(said, len(TUNE_GEMM_SHAPES))
    for name, kernel in functions(cubin).items():
        assert count_of(kernel)["HGMMA"] == 4, name  # a k tile


def test_hopper_engines_are_nothing_elsewhere(tmp_path):
    assert_nothing_for_sm_80("inst_gemm_w8_s8_f16.cu", len(TUNE_GEMM_SHAPES), tmp_path)
    assert_nothing_for_sm_80("inst_small_wgmma_w8_f16.cu", 4 * len(TUNE_WGMMA_SHAPES), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_small_kernel_of_the_build(dtype, tmp_path):
    shapes = re.findall(r"\{\d+, \d+, 8\}", (CSRC / "small_w8_plan.h").read_text())
    cubin = compile_cubin(CSRC / f"inst_small_w8_{dtype}.cu", "90a", tmp_path)
    assert assert_nothing_spills(cubin) == 4 * len(shapes)  # both kinds of codes and of scales

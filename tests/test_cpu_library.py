"""The CPU library, each instruction-set level forced in turn, against the reference on canonical tensors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from nf4linear import native, reference, reorder
from nf4linear.formats import EightBitSpec, FourBitSpec
from operands import SPECS, cut_shard, fresh_weight, spec_id

LEVELS = ("portable", "avx2", "avx512_core", "avx512")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MORE_SPECS = (
    FourBitSpec("nf4", 80, 576),  # K of nine blocks: absmax_q is padded
    FourBitSpec("nf4", 40, 2752),  # nested groups change inside rows, at other places in each
    FourBitSpec("nf4", 16, 4096, blocksize=4096),
    FourBitSpec("nf4", 5, 128, double_quant=False),
    FourBitSpec("fp4", 70, 320, blocksize=64),
    FourBitSpec("nf4", 300, 34, blocksize=32),  # flat, several blocks a thread
    EightBitSpec("w8_s8", 33, 128, group_size=64),
    EightBitSpec("w8_u8", 65, 130),
)
TILED = [spec for spec in (*SPECS, *MORE_SPECS) if spec.layout != "flat"]
SOURCES = Path(__file__).parent.parent / "csrc" / "cpu"


@pytest.fixture(scope="session")
def library_file(tmp_path_factory) -> Path:
    """The installed library, or one built here when the package was installed without."""
    name = "libnf4linear_cpu.so"
    for folder in native.library_folders():
        if (folder / name).is_file():
            return folder / name
    if not shutil.which("cmake") or not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no CPU library is installed, and cmake or a C++ compiler to build it is missing")
    build = tmp_path_factory.mktemp("build")
    subprocess.run(["cmake", "-S", SOURCES, "-B", build], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "-j", "2"], check=True, capture_output=True)
    return build / name


@pytest.fixture(scope="session", params=LEVELS)
def library(request, library_file, tmp_path_factory) -> native.CpuLibrary:
    """One copy of the library a level: the level is chosen once a loaded file."""
    copy = tmp_path_factory.mktemp(request.param) / library_file.name
    shutil.copy(library_file, copy)
    previous = os.environ.get("NF4LINEAR_CPU_LEVEL")
    os.environ["NF4LINEAR_CPU_LEVEL"] = request.param
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a level that this machine does not have
            opened = native.CpuLibrary(copy)
    finally:
        os.environ.pop("NF4LINEAR_CPU_LEVEL")
        if previous is not None:
            os.environ["NF4LINEAR_CPU_LEVEL"] = previous
    if not opened.description.endswith(f" {request.param}"):
        pytest.skip(f"this machine has no {request.param}")
    return opened


def test_a_level_that_is_not_to_be_had_is_said(library_file, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = native.CpuLibrary(library_file).description.split()[-1]
    for quiet in (level, ""):
        monkeypatch.setenv("NF4LINEAR_CPU_LEVEL", quiet)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            native.CpuLibrary(library_file)
    monkeypatch.setenv("NF4LINEAR_CPU_LEVEL", "avx1024")
    with pytest.warns(UserWarning, match=r"NF4LINEAR_CPU_LEVEL is 'avx1024', .* runs '\w+'"):
        native.CpuLibrary(library_file)


class Weight:
    """One random weight: canonical tensors, packed tensors and the argument struct."""

    def __init__(self, spec, seed=0):
        self.spec = spec
        self.canonical = fresh_weight(spec, seed)
        self.packed = reorder.pack(spec, self.canonical)
        nested = (self.packed.get(name) for name in ("nested_code", "nested_absmax", "nested_offset"))
        self.struct = native.describe_weight(spec, self.packed["qweight"], self.packed[spec.scales_name], *nested)


def guarded(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A view [rows, columns] inside a buffer of sentinels, and the buffer."""
    buffer = torch.full((rows * columns + 128,), 1234.0, dtype=dtype)
    return buffer[64 : 64 + rows * columns].view(rows, columns), buffer


def assert_guards(buffer: torch.Tensor) -> None:
    assert (buffer[:64] == 1234).all() and (buffer[-64:] == 1234).all(), "wrote outside the output"


@pytest.mark.parametrize("spec", (*SPECS, *MORE_SPECS), ids=spec_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_is_bit_identical(library, spec, dtype):
    weight = Weight(spec)
    out, buffer = guarded(spec.n, spec.k, dtype)
    assert library.dequantize(weight.struct, out)
    bits = torch.int32 if dtype == torch.float32 else torch.int16  # -0.0 is not 0.0
    assert torch.equal(out.view(bits), reference.dequantize(spec, weight.canonical, dtype).view(bits))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_rounds_extreme_scales(library, dtype):
    """Subnormal, overflowing and non-finite results are those of torch's own conversions."""
    spec = FourBitSpec("nf4", 16, 256, double_quant=False)
    weight = Weight(spec)
    scales = torch.tensor([1e-42, 3e-39, 1e-7, 6e-8, 7e4, 3e38, float("inf"), 0.0]).repeat(8)
    weight.canonical["absmax"].copy_(scales)
    weight.packed["absmax"].copy_(reorder.pack(spec, weight.canonical)["absmax"])
    out = torch.empty(spec.n, spec.k, dtype=dtype)
    assert library.dequantize(weight.struct, out)
    torch.testing.assert_close(out, reference.dequantize(spec, weight.canonical, dtype), rtol=0, atol=0, equal_nan=True)


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


# Norm-wise against float64: 16-bit outputs are rounded once (at most 2^-11 and 2^-8 of a value).
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("spec", TILED, ids=spec_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_matches_float64(library, spec, dtype):
    weight = Weight(spec)
    exact = reference.dequantize(spec, weight.canonical, torch.float32).double()
    generator = torch.Generator().manual_seed(1)
    for m in (1, 2, 3, 4, 7, 12, 13, 16, 29):
        x = torch.randn(m, spec.k, generator=generator).to(dtype)
        bias = torch.randn(spec.n, generator=generator).to(dtype) if m % 2 else None
        y, buffer = guarded(m, spec.n, dtype)
        assert library.linear(weight.struct, x, bias, y)
        expected = x.double() @ exact.T + (0 if bias is None else bias.double())
        assert relative_error(y, expected) < TOLERANCE[dtype], f"M={m}"
        assert_guards(buffer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", (1, 2, 5, 31))
def test_one_hot_inputs_give_the_decoded_weights(library, dtype, m):
    """Every column of W, once through each row of a batch: a wrong place of any weight shows."""
    spec = FourBitSpec("nf4", 35, 320)
    weight = Weight(spec)
    exact = reference.dequantize(spec, weight.canonical, torch.float32)
    for first in range(0, spec.k - m + 1, m):
        x = torch.zeros(m, spec.k, dtype=dtype)
        x[torch.arange(m), first + torch.arange(m)] = 1
        y = torch.empty(m, spec.n, dtype=dtype)
        assert library.linear(weight.struct, x, None, y)
        torch.testing.assert_close(y.float(), exact[:, first : first + m].T, rtol=2**-7, atol=0)


def test_bf16_error_is_no_larger_than_that_of_16_bit_weights(library):
    spec = FourBitSpec("nf4", 256, 1024)
    weight = Weight(spec)
    exact = reference.dequantize(spec, weight.canonical, torch.float32).double()
    weight_16 = reference.dequantize(spec, weight.canonical, torch.bfloat16).double()
    for m in (1, 16, 64):
        x = torch.randn(m, spec.k, generator=torch.Generator().manual_seed(m)).bfloat16()
        y = torch.empty(m, spec.n, dtype=torch.bfloat16)
        assert library.linear(weight.struct, x, None, y)
        expected = x.double() @ exact.T
        dequantized = (x.double() @ weight_16.T).bfloat16()
        assert relative_error(y, expected) <= 1.15 * relative_error(dequantized, expected)


@pytest.fixture
def medium_precision():
    """torch's switch that lets float32 matrices be multiplied in bfloat16."""
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("spec", (TILED[0], EightBitSpec("w8_s8", 33, 130)), ids=spec_id)
def test_float32_in_bfloat16_only_where_torch_allows_it(library, spec, medium_precision):
    weight = Weight(spec)
    exact = reference.dequantize(spec, weight.canonical, torch.float32).double()
    for m in (1, 2, 7, 16, 29):
        x = torch.randn(m, spec.k, generator=torch.Generator().manual_seed(m))
        y, buffer = guarded(m, spec.n, torch.float32)
        assert library.linear(weight.struct, x, None, y)
        error = relative_error(y, x.double() @ exact.T)
        # One row of x meets 8-bit weights in float32 everywhere: memory is what that waits for.
        has_bf16 = library.description.endswith(" avx512") and (m > 1 or spec.layout == "tile16x64")
        assert (1e-4 < error < 4e-3) if has_bf16 else error < TOLERANCE[torch.float32], f"M={m}"
        assert_guards(buffer)
    torch.set_float32_matmul_precision("high")  # not enough: that asks for more than bfloat16 has
    assert library.linear(weight.struct, x, None, y)
    assert relative_error(y, x.double() @ exact.T) < TOLERANCE[torch.float32]


def test_bfloat16_products_of_float32_x_have_every_weight_in_its_place(library, medium_precision):
    spec = FourBitSpec("nf4", 35, 320)
    weight = Weight(spec)
    exact = reference.dequantize(spec, weight.canonical, torch.float32)
    for m in (1, 5):
        for first in range(0, spec.k - m + 1, m):
            x = torch.zeros(m, spec.k)
            x[torch.arange(m), first + torch.arange(m)] = 1
            y = torch.empty(m, spec.n)
            assert library.linear(weight.struct, x, None, y)
            torch.testing.assert_close(y, exact[:, first : first + m].T, rtol=2**-7, atol=0)


def test_shard_finds_its_nested_scales(library):
    """A slice of rows and k-blocks of a larger weight gives the same part of the result."""
    spec = FourBitSpec("nf4", 96, 1024)
    weight = Weight(spec)
    shard = cut_shard(spec, weight.packed, (32, 64), (512, 1024))
    out = torch.empty(shard.spec.n, shard.spec.k)
    assert library.dequantize(shard.weight, out)
    whole = reference.dequantize(spec, weight.canonical, torch.float32)
    assert torch.equal(out, whole[32:64, 512:])
    x = torch.randn(3, shard.spec.k)
    y = torch.empty(3, shard.spec.n)
    assert library.linear(shard.weight, x, None, y)
    torch.testing.assert_close(y, x @ out.T, rtol=1e-4, atol=1e-4)


def test_rows_of_x_may_be_strided(library):
    spec = FourBitSpec("nf4", 32, 192)
    weight = Weight(spec)
    for m in (1, 2, 5):
        x = torch.randn(m, 400)[:, 3 : 3 + spec.k]
        y, contiguous = torch.empty(m, spec.n), torch.empty(m, spec.n)
        assert library.linear(weight.struct, x, None, y)
        assert library.linear(weight.struct, x.contiguous(), None, contiguous)
        assert torch.equal(y, contiguous)


def test_flat_weights_are_left_to_a_gemm(library):
    weight = Weight(FourBitSpec("nf4", 20, 100))
    assert not library.linear(weight.struct, torch.randn(2, 100), None, torch.empty(2, 20))


def test_many_rows_are_left_to_a_gemm_where_it_is_faster(library):
    weight = Weight(FourBitSpec("nf4", 16, 64))
    for m, dtype, level in ((65, torch.float32, "portable"), (2049, torch.bfloat16, "avx512")):
        x, y = torch.randn(m, 64).to(dtype), torch.empty(m, 16, dtype=dtype)
        own = library.linear(weight.struct, x, None, y)
        assert own or library.description.endswith((" portable", " avx512"))
        if library.description.endswith(f" {level}"):
            assert not own


def test_refuses_bad_arguments(library):
    weight = Weight(FourBitSpec("nf4", 16, 64))
    weight.struct.blocksize = 48
    with pytest.raises(native.NativeError, match="out of range"):
        library.dequantize(weight.struct, torch.empty(16, 64))


def test_same_bits_from_every_thread_and_again(library):
    """Calls from several Python threads at once do not disturb each other, and repeat bit for bit."""
    spec = FourBitSpec("nf4", 272, 512)
    weight = Weight(spec)
    inputs = [torch.randn(m, spec.k).bfloat16() for m in (1, 2, 9, 40)]

    def run(x):
        y = torch.empty(len(x), spec.n, dtype=x.dtype)
        assert library.linear(weight.struct, x, None, y)
        return y

    expected = [run(x) for x in inputs]
    failures = []

    def worker():
        for _ in range(20):
            for x, y in zip(inputs, expected, strict=True):
                if not torch.equal(run(x), y):
                    failures.append(len(x))

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("m", (1, 2, 9, 40))
def test_threads_do_not_change_a_bit(library, m, monkeypatch):
    spec = FourBitSpec("nf4", 272, 512)
    weight, x, results = Weight(spec), torch.randn(m, spec.k), []
    for threads in (1, 2, 3, 70):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        y = torch.empty(m, spec.n)
        assert library.linear(weight.struct, x, None, y)
        results.append(y)
    assert all(torch.equal(results[0], each) for each in results[1:])


FORK = """
import os, sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
from nf4linear import native
from nf4linear.formats import FourBitSpec
from test_cpu_library import Weight
library = native.CpuLibrary({path!r})
weight = Weight(FourBitSpec("nf4", 512, 512))
x, y = torch.randn(4, 512), torch.empty(4, 512)
torch.set_num_threads(2)
library.linear(weight.struct, x, None, y)
child = os.fork()
if child == 0:
    z = torch.empty(4, 512)
    library.linear(weight.struct, x, None, z)
    os._exit(0 if z.numpy().tobytes() == y.numpy().tobytes() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_hang(library_file):
    tests = str(Path(__file__).parent)
    root = str(Path(native.__file__).parent.parent)
    program = FORK.format(root=root, tests=tests, path=str(library_file))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

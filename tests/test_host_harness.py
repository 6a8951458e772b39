"""The headers of csrc compiled on the host: same tables, same index maps, same structs as the Python side."""

import ctypes
import math
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nf4linear import layout, native, reference
from nf4linear.formats import BLOCKSIZES, FORMATS, FourBitSpec

HOST = Path(__file__).parent / "host"
CSRC = Path(__file__).parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compile_host(source: Path, folder: Path) -> Path:
    program = folder / source.stem
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """ask("tile16x64 48 128") -> the numbers csrc answers with."""
    program = compile_host(HOST / "harness.cpp", tmp_path_factory.mktemp("harness"))

    def ask(question: str) -> list[int]:
        done = subprocess.run([program], input=question + "\n", capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    return ask


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_codebooks(ask, name):
    assert ask(name) == [bits(value) for value in FORMATS[name].code]


@pytest.mark.parametrize("name", ["w8_s8", "w8_u8"])
def test_every_byte_of_the_integer_formats(ask, name):
    assert ask(name) == [bits(float(byte - FORMATS[name].bias)) for byte in range(256)]


def test_inverse_of_127(ask):
    assert ask("inv127") == [bits(reference.INV_127)]


MAPS = {
    "tile16x64": layout.tile16x64_byte,
    "tile16x32": layout.tile16x32_byte,
    "absmax_q": layout.absmax_q_byte,
    "row_scale": layout.row_scale_index,
}


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 40), columns=st.integers(1, 150))
def test_index_maps(ask, name, rows, columns):
    columns = -(-columns // 64) * 64 if name == "tile16x64" else columns
    want = [MAPS[name](row, column, columns) for row in range(rows) for column in range(columns)]
    assert ask(f"{name} {rows} {columns}") == want


@pytest.mark.parametrize("blocksize", [b for b in BLOCKSIZES if b >= 64])
def test_nested_groups(ask, blocksize):
    rows, columns = 37, 2 * blocksize // 64
    want = [layout.nested_group(row, kb, columns, blocksize) for row in range(rows) for kb in range(columns)]
    assert ask(f"nested {rows} {columns} {blocksize}") == want


@pytest.mark.parametrize(("k", "first"), [(64, 16), (1088, 256), (4096, 1536)])
def test_rows_of_a_weight_lie_where_the_packed_tensors_have_them(ask, k, first):
    def skipped(name: str, double_quant: bool) -> int:
        tensor = FourBitSpec("nf4", first, k, double_quant=double_quant).packed_tensors()[name]
        return math.prod(tensor.shape) * tensor.dtype.itemsize

    offsets = [skipped("qweight", True), skipped("absmax_q", True), skipped("absmax", False)]
    assert ask(f"rows {k} {first} 48") == [*offsets, 48, 16 + first]


@pytest.mark.parametrize(("name", "mirror"), [("weight", native.Weight), ("linear_args", native.LinearArgs)])
def test_structs(ask, name, mirror):
    fields = [getattr(mirror, field).offset for field, _ in mirror._fields_]
    assert ask(name) == [ctypes.sizeof(mirror), *fields]


def test_constants(ask):
    import torch

    dtypes = [native.DTYPE_IDS[d] for d in (torch.float32, torch.float16, torch.bfloat16)]
    layouts = [native.LAYOUT_IDS[name] for name in ("flat", "tile16x64", "tile16x32")]
    formats = [native.FORMAT_IDS[name] for name in ("nf4", "fp4", "w8_s8", "w8_u8")]
    codes = [native.ABI_VERSION, native.OK, native.USE_GEMM, native.NO_KERNEL_IMAGE]
    assert ask("constants") == codes + formats + layouts + dtypes


def test_argument_checks(tmp_path):
    done = subprocess.run([compile_host(HOST / "validate.cpp", tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

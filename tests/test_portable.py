"""The ports of the dequantize kernel, built for the host: bare 16-bit conversions, and all three programs."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from nf4linear import reference
from nf4linear.formats import BLOCKSIZES, FourBitSpec
from nf4linear.lab import weight_file
from operands import same_bits

PORTABLE = Path(__file__).parents[1] / "csrc" / "portable"
PLATFORMS = ("iluvatar", "moore_threads", "metax")
SIXTEEN_BIT = {"half": torch.float16, "bfloat16": torch.bfloat16}
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None or not shutil.which("make"), reason="no C++ compiler or no make")


# ---- conversions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def convert(tmp_path_factory):
    """convert(name, tensor, dtype) -> what the C++ function gives for each element."""
    program = tmp_path_factory.mktemp("numeric") / "numeric"
    source = Path(__file__).parent / "host_portable" / "numeric.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{PORTABLE.parent}"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], check=True)

    def run(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        done = subprocess.run([program, name], input=values.numpy().tobytes(), capture_output=True, check=True)
        return torch.frombuffer(bytearray(done.stdout), dtype=dtype)

    return run


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit type."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def ties_and_neighbours(dtype: torch.dtype) -> torch.Tensor:
    """float32 midpoints between every two neighbouring finite values of `dtype`, and the floats on both their sides.

    The last of them lie between the largest finite value and the power of two that rounds to infinity.
    """
    finite = all_values(dtype).double()
    finite = finite[finite.isfinite() & (finite >= 0)].unique()
    beyond = torch.cat([finite, 2 * finite[-1:] - finite[-2:-1]])
    middles = ((beyond[:-1] + beyond[1:]) / 2).float()
    bits = middles.view(torch.int32)
    around = torch.cat([(bits - 1).clamp(min=0), bits, bits + 1]).view(torch.float32)
    return torch.cat([around, -around])


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_widening_of_all_65536_values(convert, name):
    dtype = SIXTEEN_BIT[name]
    values = all_values(dtype)
    got, want = convert(f"{name}_to_float", values.view(torch.int16), torch.float32), values.float()
    number = ~want.isnan()
    assert same_bits(got[number], want[number])
    assert got[~number].isnan().all()


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_narrowing_of_all_65536_values_is_their_own_bits(convert, name):
    dtype = SIXTEEN_BIT[name]
    values = all_values(dtype)
    got = convert(f"float_to_{name}", values.float(), dtype)
    number = ~values.isnan()
    assert same_bits(got[number], values[number])
    assert (got[~number].view(torch.int16) == 0x7FFF).all()  # as CUDA's conversions


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_every_rounding_tie_and_its_neighbours(convert, name):
    dtype = SIXTEEN_BIT[name]
    values = ties_and_neighbours(dtype)
    assert len(values) > 6 * 30000
    assert same_bits(convert(f"float_to_{name}", values, dtype), values.to(dtype))


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_narrowing_of_random_bits(convert, name):
    dtype = SIXTEEN_BIT[name]
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    values = values[~values.isnan()]
    assert same_bits(convert(f"float_to_{name}", values, dtype), values.to(dtype))


# ---- the three ports ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PLATFORMS)
def port(request, tmp_path_factory) -> Path:
    """The program of one platform's source file, compiled for the host."""
    build = tmp_path_factory.mktemp(request.param)
    subprocess.run(["make", "-s", "-C", str(PORTABLE / request.param), "host", f"BUILD={build}"], check=True)
    return build / "nf4_dequant_host"


def lab_weight(n: int, k: int, blocksize: int = 64, tables: str = "fp32") -> weight_file.LabWeight:
    """A weight with an all-zero block, a block of float32 subnormals and a large one."""
    spec = FourBitSpec("nf4", n, k, blocksize)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k + blocksize))
    blocks = weight.view(-1).split(blocksize)
    blocks[0].zero_()
    if len(blocks) > 3:
        blocks[1].fill_(1e-40)
        blocks[2].mul_(1e4)
    return weight_file.with_tables(spec, reference.quantize(spec, weight), tables)


def run_port(port: Path, weight: weight_file.LabWeight, dtype: str, folder: Path, *options: str):
    source, output = folder / "weight.bin", folder / "out.raw"
    weight_file.write(source, weight)
    done = subprocess.run([port, source, output, dtype, *options], capture_output=True, text=True, check=True)
    values = torch.frombuffer(
        bytearray(output.read_bytes()), dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    )
    return values.view(weight.spec.n, weight.spec.k), done.stdout


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "weight",
    [lab_weight(64, 256), lab_weight(37, 333), lab_weight(1, 1), lab_weight(9, 1001, tables="fp16")]
    + [lab_weight(8, 4096, blocksize) for blocksize in BLOCKSIZES],
    ids=lambda w: f"{w.spec.n}x{w.spec.k}-b{w.spec.blocksize}-{w.tables}",
)
def test_port_equals_the_reference_bit_for_bit(port, weight, dtype, tmp_path):
    got, _ = run_port(port, weight, dtype, tmp_path)
    assert same_bits(got, reference.dequantize(weight.spec, weight.canonical, got.dtype))


def test_port_prints_its_times(port, tmp_path):
    _, text = run_port(port, lab_weight(64, 256), "fp16", tmp_path, "1", "3")
    assert '"repeats": 3' in text and '"median_ms"' in text


def test_port_refuses_a_damaged_file(port, tmp_path):
    source = tmp_path / "weight.bin"
    weight_file.write(source, lab_weight(64, 256))
    source.write_bytes(source.read_bytes()[:-1])
    done = subprocess.run([port, source, tmp_path / "out.raw", "fp16"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "file size" in done.stderr
    assert not (tmp_path / "out.raw").exists()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_run_script(platform, tmp_path):
    """run.sh builds beside its source and puts the output beside the file."""
    folder = tmp_path / "csrc" / "portable"
    shutil.copytree(PORTABLE.parent, folder.parent, ignore=shutil.ignore_patterns("build"))
    weight = lab_weight(16, 64)
    weight_file.write(tmp_path / "w.bin", weight)
    subprocess.run(
        [folder / platform / "run.sh", "host", "w.bin", "bf16"], cwd=tmp_path, check=True, capture_output=True
    )
    output = tmp_path / f"w-{platform}-host-bf16.raw"
    got = torch.frombuffer(bytearray(output.read_bytes()), dtype=torch.bfloat16).view(16, 64)
    assert same_bits(got, reference.dequantize(weight.spec, weight.canonical, torch.bfloat16))

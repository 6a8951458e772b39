"""Every stage of the ladder on a GPU, through the stand-alone program: the same bits as the reference."""

import shutil

import pytest
import torch

from nf4linear import reference
from nf4linear.formats import BLOCKSIZES, FourBitSpec
from nf4linear.lab import program, weight_file
from operands import same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = [(512, 1024), (37, 333), (1, 1), (1, 7), (255, 1001), (511, 4096)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    return program.build(tmp_path_factory.mktemp("lab"))


def special_weight(n: int, k: int, blocksize: int, tables: str) -> weight_file.LabWeight:
    """Fresh random weights with an all-zero block, one of float32 subnormals and a large one."""
    spec = FourBitSpec("nf4", n, k, blocksize)
    weight = torch.randn(n, k)
    blocks = weight.view(-1).split(blocksize)
    blocks[0].zero_()
    if len(blocks) > 3:
        blocks[1].fill_(1e-40)
        blocks[2].mul_(1e4)
    return weight_file.with_tables(spec, reference.quantize(spec, weight), tables)


def check(lab, folder, weight: weight_file.LabWeight) -> None:
    weight_file.write(folder / "w.bin", weight)
    program.run_stages(lab, folder / "w.bin", program.STAGES, tuple(DTYPES), output=folder / "out")
    for name, dtype in DTYPES.items():
        want = reference.dequantize(weight.spec, weight.canonical, dtype)
        for stage in program.STAGES:
            data = bytearray((folder / f"out-{stage}-{name}.raw").read_bytes())
            assert same_bits(torch.frombuffer(data, dtype=dtype).view(want.shape), want), (stage, name)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_shapes(lab, shape, tmp_path):
    check(lab, tmp_path, special_weight(*shape, 64, "fp32"))


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_blocksizes(lab, blocksize, tmp_path):
    check(lab, tmp_path, special_weight(129, 4096, blocksize, "fp32"))


def test_fp16_tables(lab, tmp_path):
    check(lab, tmp_path, special_weight(130, 1000, 64, "fp16"))


@pytest.mark.parametrize("protocol", ["idle", "cold"])
def test_times_are_reported(lab, protocol, tmp_path):
    weight_file.write(tmp_path / "w.bin", special_weight(512, 1024, 64, "fp32"))
    times = program.run_stages(
        lab, tmp_path / "w.bin", ("v0", "v4"), ("fp16",), warmup=1, repeats=5, protocols=(protocol,)
    )
    assert [(t.stage, t.dtype, t.protocol) for t in times] == [("v0", "fp16", protocol), ("v4", "fp16", protocol)]
    assert all(0 < t.min_ms <= t.median_ms <= t.max_ms and t.repeats >= 5 for t in times)


def test_a_damaged_file_is_refused(lab, tmp_path):
    weight_file.write(tmp_path / "w.bin", special_weight(16, 64, 64, "fp32"))
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "w.bin").write_bytes(data)
    with pytest.raises(program.ProgramError, match="checksum"):
        program.run_stages(lab, tmp_path / "w.bin", ("v4",), ("fp16",))

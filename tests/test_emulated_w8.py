"""The 8-bit small-batch kernel itself on the CPU, without a GPU, and every packed conversion; see test_emulated.py."""

import random
import re
import subprocess

import pytest

from test_emulated import COMPILER, CSRC, check, compile_kernel, run

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

# (row tiles, tokens, warps) of SMALL_W8_SHAPES in csrc/small_w8_plan.h.
SHAPES = [tuple(map(int, s)) for s in re.findall(r"\{(\d+), (\d+), (\d+)\}", (CSRC / "small_w8_plan.h").read_text())]
# Fewer tiles than a burst, ragged bursts, ragged rows.
SIZES = ((48, 192), (5, 64), (100, 576), (33, 1088), (200, 640), (70, 1024), (130, 768))
# Ways into shared memory: bulk copies (sm_90 and later), each lane's own (before).
COPIES = {"bulk": {}, "lane": {"small_w8_load.cuh": ("LANE_COPIES = false", "LANE_COPIES = true")}}


def random_cases(count: int, seed: int) -> list[str]:
    """Lines for the program: every compiled shape and size, one slice and several, both kinds of scales."""
    draw = random.Random(seed)
    cases = []
    for index in range(count):
        shape = index % len(SHAPES)
        n, k = draw.choice(SIZES)
        group = draw.choice([g for g in (0, 0, 64, 128) if g == 0 or k % g == 0])
        most = SHAPES[shape][1]
        tokens = draw.choice((1, most // 2 + 1, most))
        slices, sms = draw.choice((1, 1, 2, 3, 5)), draw.choice((1, 2, 3, 8, 16))
        u8, half, bias, transposed = (draw.randrange(2) for _ in range(4))
        cases.append(" ".join(map(str, (n, k, group, u8, half, tokens, shape, slices, sms, bias, transposed))))
    return cases


@pytest.fixture(scope="module", params=COPIES)
def program(request, tmp_path_factory):
    return compile_kernel(tmp_path_factory.mktemp("emulated"), COPIES[request.param], "small_w8")


@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_on_the_cpu(program, seed):
    check(program, random_cases(5 * len(SHAPES), seed))


@pytest.mark.parametrize(
    "change",
    [
        # Tiles that do not exist are read.
        ("small_w8_load.cuh", "min(work.tiles - in_burst * BURST, BURST)", "BURST"),
        # Scales of tiles that were never copied are used.
        ("small_w8.cuh", "if (GROUPED && j >= tiles) break;", ""),
        # The last slice is left out.
        ("small_batch.cuh", "const int slices = gridDim.y;", "const int slices = gridDim.y - 1;"),
    ],
    ids=lambda change: change[1][:20],
)
def test_the_check_can_fail(tmp_path, change):
    name, old, new = change
    cases = random_cases(5 * len(SHAPES), 0)
    program = compile_kernel(tmp_path, {name: (old, new)}, "small_w8")
    assert run(program, cases) != ["ok"] * len(cases)


def test_every_code_is_converted_exactly(tmp_path):
    done = subprocess.run([compile_kernel(tmp_path, name="convert8")], capture_output=True, text=True, check=True)
    assert done.stdout == f"{4 * 2 * 256 * 256} right\n"


def test_a_wrong_conversion_is_found(tmp_path):
    program = compile_kernel(tmp_path, {"convert8.cuh": ("0x00800080", "0x00000080")}, "convert8")
    assert "bf16 s8: " in subprocess.run([program], capture_output=True, text=True, check=True).stdout

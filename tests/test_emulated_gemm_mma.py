"""The mma.sync prefill kernel itself on the CPU, without a GPU: csrc/gemm_mma.cuh compiled for the host, as
test_emulated.py does it for the small-batch kernel. Its weights are exact, so the bound on its error is that of float32
sums."""

import random
import shutil
from pathlib import Path

import pytest

from test_emulated import SIZES, check, compile_kernel, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

# Tokens of GEMM_MMA_SHAPES in csrc/gemm_mma_plan.h.
SHAPES = (48, 64, 96, 128)
# Shared memory of a block: of an A10 (two stages), an A100 and an H200 (three).
LIMITS = (101376, 166912, 232448)


def random_cases(count: int, seed: int) -> list[str]:
    """Lines for the program: output tiles whole and cut, by few blocks and by many; whole weights and shards."""
    draw = random.Random(seed)
    cases = []
    for index in range(count):
        shape = index % len(SHAPES)
        n, k, blocksize = draw.choice((*SIZES, (272, 576, 64)))
        tokens = draw.choice((1, SHAPES[shape] // 2 + 1, SHAPES[shape], SHAPES[shape] + 17))
        n0, kb0, kb_full = 0, 0, k // 64
        if blocksize == 64 and draw.random() < 0.3:
            n0, kb0, kb_full = draw.randrange(500), draw.randrange(30), kb_full + draw.randrange(30, 90)
        nested, fp4, half, bias = draw.random() < 0.7, draw.randrange(2), draw.randrange(2), draw.randrange(2)
        cut, sms, limit = draw.randrange(4) > 0, draw.choice((1, 2, 3, 8)), draw.choice(LIMITS)
        case = (n, k, blocksize, int(nested), n0, kb0, kb_full, fp4, half, tokens, shape, int(cut), sms, limit, bias)
        cases.append(" ".join(map(str, case)))
    return cases


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return compile_kernel(tmp_path_factory.mktemp("emulated"), name="gemm_mma")


@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_on_the_cpu(program, seed):
    check(program, random_cases(20, seed))


@pytest.mark.parametrize(
    "change",
    [
        # Reads tokens that do not exist, so beyond the end of x.
        ("gemm_mma_load.cuh", "i * STEP < tokens", "true"),
        # A k tile meets the scales of the one before.
        ("gemm_mma.cuh", "make_tables(scales, k + S.GROUPS, next)", "make_tables(scales, k, now)"),
        # The sums of the last block are left out.
        ("gemm_mma_finish.cuh", "block < sharers.count;", "block < sharers.count - 1;"),
    ],
    ids=lambda change: change[2],
)
def test_the_check_can_fail(tmp_path, change):
    name, old, new = change
    program = compile_kernel(tmp_path, {name: (old, new)}, name="gemm_mma")
    cases = random_cases(20, 0)
    assert run(program, cases) != ["ok"] * len(cases)

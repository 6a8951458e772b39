"""How the mma.sync prefill engine deals its work, walked on the host: every output tile and k tile once, slots and
counters that nobody else uses, memory that suffices on every GPU."""

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HOST = Path(__file__).parent / "host"
CSRC = Path(__file__).parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

PLAN = (CSRC / "gemm_mma_plan.h").read_text()
SHAPES = re.findall(r"\{(\d+), (\d+)\}", PLAN)
LEAST_TILES, MOST_SHARERS = (
    int(re.search(rf"{name} = (\d+)", PLAN)[1]) for name in ("GEMM_MMA_LEAST_TILES", "GEMM_MMA_MOST_SHARERS")
)
# SMs, shared memory that a block may use, stages of a ring that fit.
DEVICES = {"A10": (72, 101376, 2), "A100": (108, 166912, 3), "H200": (132, 232448, 3)}
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("gemm") / "gemm_mma_plan"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([COMPILER, *flags, str(HOST / "gemm_mma_plan.cpp"), "-o", str(program)], check=True)
    return program


def ask(program: Path, questions: list[str]) -> list[str]:
    text = "\n".join(questions) + "\n"
    return subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def question(shape, m, n, k, *, cut=1, sms=132, shared=232448) -> str:
    return " ".join(map(str, (shape, m, n, k, cut, sms, shared)))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def check_walk(answer: str, m: int, n: int, k: int, sms: int, cut: bool = True) -> None:
    plan, *blocks = answer.split(";")
    tokens, block_rows, k_tiles, token_tiles, row_blocks, count, whole, _, workspace, slot, stages = numbers(plan)
    assert k_tiles == k // 64 and token_tiles == -(-m // tokens) and row_blocks == -(-n // block_rows)
    assert len(blocks) == count <= min(sms, 256) and stages in (2, 3)
    spans: dict[int, list[tuple[int, int]]] = {}
    places: dict[int, tuple[int, int]] = {}
    sharers: dict[int, tuple[int, int]] = {}
    met: dict[int, list[int]] = {}
    slots = set()
    lengths = []
    for block, text in enumerate(blocks):
        length, *pieces = text.split(",")
        assert sum(p[2] - p[1] for p in map(numbers, pieces)) == int(length)
        lengths.append(int(length))
        for tile, begin, end, token_tile, row_block, first, number in map(numbers, pieces):
            spans.setdefault(tile, []).append((begin, end))
            assert places.setdefault(tile, (token_tile, row_block)) == (token_tile, row_block)
            if tile < whole:
                assert (begin, end) == (0, k_tiles) and tile % count == block
            elif end - begin < k_tiles:
                assert sharers.setdefault(tile, (first, number)) == (first, number)
                met.setdefault(tile, []).append(block)
                assert (begin == 0) == (block == first), "the first sharer begins the tile"
                assert (block, begin == 0) not in slots, "a slot holds one tile's sums"
                slots.add((block, begin == 0))
    for tile, (first, number) in sharers.items():
        assert met[tile] == list(range(first, first + number))
        least = max(LEAST_TILES, k_tiles // MOST_SHARERS)  # of a block's stretch
        assert 2 <= number <= -(-(k_tiles - 1) // least) + 1
    assert len({first for first, _ in sharers.values()}) == len(sharers), "a counter counts for one tile"
    assert sorted(spans) == list(range(token_tiles * row_blocks))
    assert len(set(places.values())) == len(places)
    assert all(0 <= t < token_tiles and 0 <= r < row_blocks for t, r in places.values())
    for parts in spans.values():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] == k_tiles and all(a[1] == b[0] for a, b in pairwise(parts))
    assert workspace == (count * 2 * slot + 1024 if whole < len(spans) else 0)
    if whole < len(spans):
        assert cut and max(lengths) - min(lengths) <= 1, "all blocks end together"


@QUICK
@given(
    shape=st.integers(0, len(SHAPES) - 1),
    m=st.integers(1, 1500),
    n=st.integers(1, 20_000),
    tiles=st.integers(1, 300),
    cut=st.booleans(),
    sms=st.sampled_from([1, 16, 72, 108, 132]),
    shared=st.sampled_from([shared for _, shared, _ in DEVICES.values()]),
)
def test_every_tile_and_every_slot_once(program, shape, m, n, tiles, cut, sms, shared):
    (answer,) = ask(program, [question(shape, m, n, tiles * 64, cut=int(cut), sms=sms, shared=shared)])
    check_walk(answer, m, n, tiles * 64, sms, cut)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_every_gpu_has_room(program, shape, device):
    sms, limit, stages = DEVICES[device]
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (128256, 4096)):
        (answer,) = ask(program, [question(shape, 200, n, k, sms=sms, shared=limit)])
        check_walk(answer, 200, n, k, sms)
        *_, shared, _, _, got = numbers(answer.split(";")[0])
        assert shared <= limit and got >= stages


def test_few_output_tiles_keep_all_sms_busy(program):
    """4096 rows and 128 tokens are 32 tiles of 128 x 128; four blocks share each, and no block has parts of two."""
    (answer,) = ask(program, [question(3, 128, 4096, 4096)])
    blocks = answer.split(";")[1:]
    assert len(blocks) == 128 and all(text.count(",") == 1 for text in blocks)


def test_what_does_not_fit_is_refused(program):
    asked = [
        question(0, 2**31, 128, 64),
        question(0, 1, 2**31, 64),
        question(0, 1, 128, 2**31),
        question(0, 2**30, 2**30, 64),  # more output tiles than 32-bit indices count
        question(0, 64, 2**20, 2**17),  # more scales than they count
        question(3, 64, 4096, 4096, shared=48 << 10),
    ]
    assert ask(program, asked) == ["none"] * len(asked)

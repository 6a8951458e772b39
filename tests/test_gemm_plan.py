"""How the prefill engine deals its work, walked on the host: every output tile and k tile once, nobody waits before his
own work is done, memory that suffices."""

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

SMS, SHARED = 132, 232448  # of an H200
SHAPE_COUNT = 4
LEAST_TILES, MOST_SHARERS = 4, 16
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("gemm") / "gemm_plan"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([COMPILER, *flags, str(HOST / "gemm_plan.cpp"), "-o", str(program)], check=True)
    return program


def ask(program: Path, questions: list[str]) -> list[str]:
    text = "\n".join(questions) + "\n"
    return subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def question(shape, m, n, k, *, cut=1, sms=SMS, shared=SHARED) -> str:
    return " ".join(map(str, (shape, m, n, k, cut, sms, shared)))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def check_walk(answer: str, m: int, n: int, k: int, sms: int, cut: bool = True) -> None:
    plan, *blocks = answer.split(";")
    tokens, block_rows, k_tiles, token_tiles, row_blocks, count, whole, shared, workspace, slot = numbers(plan)
    assert k_tiles == k // 64 and token_tiles == -(-m // tokens) and row_blocks == -(-n // block_rows)
    assert len(blocks) == count <= min(sms, 256) and shared <= SHARED
    spans: dict[int, list[tuple[int, int]]] = {}
    places: dict[int, tuple[int, int]] = {}
    sharers: dict[int, tuple[int, int, int]] = {}
    met: dict[int, list[tuple[int, int]]] = {}
    slots = set()
    lengths = []
    for block, text in enumerate(blocks):
        length, *pieces = text.split(",")
        assert sum(p[2] - p[1] for p in map(numbers, pieces)) == int(length)
        lengths.append(int(length))
        for index, (tile, begin, end, token_tile, row_block, last, *shared_by) in enumerate(map(numbers, pieces)):
            spans.setdefault(tile, []).append((begin, end))
            assert places.setdefault(tile, (token_tile, row_block)) == (token_tile, row_block)
            assert last == (index == len(pieces) - 1)
            if tile < whole:
                assert (begin, end, *shared_by) == (0, k_tiles, 0, 0, 0) and tile % count == block
            elif end - begin < k_tiles:
                assert sharers.setdefault(tile, tuple(shared_by)) == tuple(shared_by)
                met.setdefault(tile, []).append((block, last))
                assert (begin == 0) == (block == shared_by[0]), "the first sharer begins the tile"
                assert (block, begin == 0) not in slots, "a slot holds one tile's sums"
                slots.add((block, begin == 0))
    for tile, (first, number, finishers) in sharers.items():
        assert met[tile] == [(first + i, i < finishers) for i in range(number)], "who finishes has nothing else to do"
        least = max(LEAST_TILES, k_tiles // MOST_SHARERS)  # of a block's stretch
        assert 1 <= finishers <= number <= -(-(k_tiles - 1) // least) + 1
    assert len({first for first, *_ in sharers.values()}) == len(sharers), "a counter counts for one tile"
    assert sorted(spans) == list(range(token_tiles * row_blocks))
    assert len(set(places.values())) == len(places)
    assert all(0 <= t < token_tiles and 0 <= r < row_blocks for t, r in places.values())
    for parts in spans.values():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] == k_tiles and all(a[1] == b[0] for a, b in pairwise(parts))
    assert workspace == (count * 2 * slot + 1024 if whole < len(spans) else 0)
    if whole < len(spans):
        assert cut and max(lengths) - min(lengths) <= 1, "all blocks end together"
    if whole >= count:
        assert all(len(parts) <= 3 for parts in spans.values())


@QUICK
@given(
    shape=st.integers(0, SHAPE_COUNT - 1),
    m=st.integers(1, 3000),
    n=st.integers(1, 20_000),
    tiles=st.integers(1, 300),
    cut=st.booleans(),
    sms=st.sampled_from([1, 16, 78, 114, 132, 300]),
)
def test_every_tile_and_every_slot_once(program, shape, m, n, tiles, cut, sms):
    (answer,) = ask(program, [question(shape, m, n, tiles * 64, cut=int(cut), sms=sms)])
    check_walk(answer, m, n, tiles * 64, sms, cut)


@pytest.mark.parametrize("shape", range(SHAPE_COUNT))
def test_real_models_fit(program, shape):
    shapes = (
        (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (128256, 4096),
        (1024, 4096), (576, 1536),
    )  # fmt: skip
    asked = [(m, n, k) for n, k in shapes for m in (65, 128, 512, 4096)]
    for answer, (m, n, k) in zip(ask(program, [question(shape, *a) for a in asked]), asked, strict=True):
        check_walk(answer, m, n, k, SMS)


def test_few_output_tiles_keep_all_sms_busy(program):
    """4096 rows and 128 tokens are 32 tiles of 128 x 128."""
    (answer,) = ask(program, [question(0, 128, 4096, 4096)])
    assert len(answer.split(";")) - 1 == SMS


def test_a_last_wave_that_is_nearly_full_is_not_cut(program):
    (answer,) = ask(program, [question(3, 256, 130 * 128, 4096)])
    assert numbers(answer.split(";")[0])[5:7] == [130, 130]


@pytest.mark.parametrize("shape", range(SHAPE_COUNT))
def test_100_000_tokens_and_weights_beyond_two_to_the_33(program, shape):
    for m, n, k in ((100_003, 4096, 4096), (100, 131_088, 65_536), (2**20, 2**20, 64)):
        (answer,) = ask(program, [question(shape, m, n, k, sms=4)])
        tokens, block_rows, k_tiles, token_tiles, row_blocks, *_ = numbers(answer.split(";")[0])
        assert (k_tiles, token_tiles, row_blocks) == (k // 64, -(-m // tokens), -(-n // block_rows))


def test_what_does_not_fit_is_refused(program):
    asked = [
        question(3, 2**31, 128, 64),
        question(3, 1, 2**31, 64),
        question(3, 1, 128, 2**31),
        question(3, 2**30, 2**30, 64),  # more output tiles than 32-bit indices count
        question(3, 512, 4096, 4096, shared=101376),
    ]
    assert ask(program, asked) == ["none"] * len(asked)

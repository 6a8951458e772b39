"""How the prefill engine deals its work, walked on the host: every output tile and k tile once, every partial sum sent
to a place of its own, memory that suffices; and which launches it chooses."""

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemm_slices import FOUR_BY_TWO, TWO_LAUNCHES, can_be_cut
from nf4linear import selfcheck
from nf4linear.formats import FourBitSpec

HOST = Path(__file__).parent / "host"
CSRC = Path(__file__).parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

SMS, SHARED = 132, 232448  # of an H200
PLAN = (CSRC / "gemm_wgmma_shape.h").read_text()
SHAPES = re.findall(r"\{(\d+), (\d), (\d+), (\d+), \d+\}", PLAN)
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


def question(shape, m, n, k, *, slices=1, sms=SMS, shared=SHARED) -> str:
    return " ".join(map(str, (shape, m, n, k, slices, sms, shared)))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def check_walk(answer: str, m: int, n: int, k: int, sms: int, slices: int = 1) -> None:
    plan, *texts = answer.split(";")
    tokens, block_rows, k_tiles, token_tiles, row_pairs, blocks, clusters, _, parts, *sizes = numbers(plan)
    steps, shared, workspace, places = sizes
    assert k_tiles == k // 64 and token_tiles == -(-m // tokens) and row_pairs == -(-n // (2 * block_rows))
    assert parts == (2 if slices == FOUR_BY_TWO else 1) and blocks == (2 if parts == 2 else max(slices, 2))
    assert shared <= SHARED and clusters * blocks <= sms
    works, shares = texts[: clusters * blocks], texts[clusters * blocks :]
    assert len(shares) == blocks
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sliced_tiles: dict[tuple[int, ...], set[tuple[int, int]]] = {}  # by their number
    meetings: dict[tuple[int, int], list[list[int]]] = {}  # of a tile and a rank
    for cluster in range(clusters):
        mine = [list(map(numbers, text.split(","))) for text in works[cluster * blocks : (cluster + 1) * blocks]]
        assert len(mine[0]) >= 1 and len({len(pieces) for pieces in mine}) == 1, "its blocks do everything together"
        for index, pieces in enumerate(zip(*mine, strict=True)):
            places_of = [tuple(piece[3:5]) for piece in pieces]
            for rank, (sliced, begin, end, token_tile, row_block, *more) in enumerate(pieces):
                assert end > begin
                spans.setdefault((token_tile, row_block), []).append((begin, end))
                sliced_tiles.setdefault(tuple(more[:1]), set()).add((token_tile, row_block))
                if more[1:]:
                    meetings.setdefault((more[0], rank), []).append(more[1:])
                assert sliced == pieces[0][0] and (not sliced or index == len(mine[0]) - 1), "the ring is empty then"
            if pieces[0][0]:
                assert len(set(places_of)) == 1, "one tile"
                lengths = [end - begin for _, begin, end, *_ in pieces]
                assert max(lengths) - min(lengths) <= 1, "stages are released by all blocks of a cluster"
            else:
                (token_tile, row), (other, next_row) = places_of
                assert (other, next_row) == (token_tile, row + 1) and row % 2 == 0, "one x"
    assert sorted(spans) == [(t, r) for t in range(token_tiles) for r in range(2 * row_pairs)]
    for cut in spans.values():
        cut.sort()
        assert cut[0][0] == 0 and cut[-1][1] == k_tiles and all(a[1] == b[0] for a, b in pairwise(cut))
        assert len(cut) in (1, 4 if parts == 2 else slices)
    sliced_tiles.pop((), None)
    assert all(len(places) == 1 for places in sliced_tiles.values()), "a number each"
    tiles = sorted(number for (number,) in sliced_tiles)
    assert tiles == list(range(len(tiles)))
    if parts == 2:
        assert steps % 4 == 0 and block_rows == 128 and len(tiles) * 8 <= 256, "eight counters a tile"
        assert workspace == len(tiles) * tokens * block_rows * 4 + 256 * 4
        check_meetings(meetings, tiles, steps, workspace - 256 * 4)
    else:
        assert workspace == 0 and not meetings
    check_shares(shares, steps, places)


def check_meetings(meetings: dict[tuple[int, int], list[list[int]]], tiles: list[int], steps: int, room: int) -> None:
    """Two blocks find each other, nobody else, and have room for half of their sums, as each brings a half at most."""
    assert sorted(meetings) == [(tile, rank) for tile in tiles for rank in range(2)]
    assert all(len(said) == 2 and said[0] == said[1] for said in meetings.values()), "of both clusters the same"
    counters, slots = [], []
    for said, _ in meetings.values():
        assert [said[2] - said[0], said[3] - said[1]] == [2, 2], "a second half's are two further"
        counters += said[:4]
        slots += said[4:]
        assert len(said) == 4 + steps
    assert len(set(counters)) == len(counters) and min(counters) >= 0 and max(counters) < 256
    assert len(set(slots)) == len(slots) and min(slots) >= 0 and (max(slots) + 1) * 32 * 64 * 4 <= room


def check_shares(shares: list[str], steps: int, places: int) -> None:
    """Each step is stored by one slice, which finds the sums of all others at places of their own."""
    owners: dict[int, int] = {}
    taken: dict[int, list[int]] = {}
    for slice_, text in enumerate(shares):
        said = [numbers(step) for step in text.split(",")]
        assert [step for step, *_ in said] == list(range(steps))
        for step, owner, *place in said:
            assert owners.setdefault(step, owner) == owner and 0 <= owner < len(shares)
            assert len(place) == (owner != slice_) and all(0 <= p < places for p in place)
            taken.setdefault(owner, []).extend(place)
    for found in taken.values():
        assert len(set(found)) == len(found), "two sums at one place"
    stored = [list(owners.values()).count(slice_) for slice_ in range(len(shares))]
    assert max(stored) - min(stored) <= 1, "all store about as much"


@QUICK
@given(
    shape=st.integers(0, len(SHAPES) - 1),
    m=st.integers(1, 3000),
    n=st.integers(1, 20_000),
    tiles=st.integers(1, 300),
    slices=st.integers(1, FOUR_BY_TWO),
    sms=st.sampled_from([1, 16, 78, 114, 132, 300]),
)
def test_every_tile_and_every_place_once(program, shape, m, n, tiles, slices, sms):
    tokens, consumers = map(int, SHAPES[shape][:2])
    (answer,) = ask(program, [question(shape, m, n, tiles * 64, slices=slices, sms=sms)])
    pairs = -(-m // tokens) * -(-n // (128 * consumers))
    if can_be_cut(tokens, consumers, pairs, tiles, slices, sms):
        check_walk(answer, m, n, tiles * 64, sms, slices)
    else:
        assert answer == "none"


def least_estimate(program: Path, m: int, n: int, k: int, sms: int) -> int:
    """Of one launch, by trying all; 0 when none fits."""
    ways = [(shape, slices) for shape in range(len(SHAPES)) for slices in range(1, FOUR_BY_TWO + 1)]
    said = ask(program, [f"estimate {question(shape, m, n, k, slices=slices, sms=sms)}" for shape, slices in ways])
    return min((int(ns) for ns in said if ns != "none"), default=0)


def check_launches(program: Path, answer: str, m: int, n: int, k: int, sms: int) -> int:
    """The number of launches, which cover the weight's rows and are the best by their estimates."""
    best = least_estimate(program, m, n, k, sms)
    if answer == "none":
        assert best == 0
        return 0
    totals, *launches = answer.split(";")
    ns, workspace = numbers(totals)
    said = [numbers(launch) for launch in launches]
    assert ns == sum(launch[-1] for launch in said) and workspace == max(launch[-2] for launch in said)
    next_row = 0
    for first_row, rows, tokens, block_rows, k_tiles, token_tiles, row_pairs, *_ in said:
        assert first_row == next_row and rows > 0 and k_tiles == k // 64
        assert token_tiles == -(-m // tokens) and row_pairs == -(-rows // (2 * block_rows))
        next_row += rows
    assert next_row == n
    if len(said) == 1:
        assert ns == best
        return 1
    assert ns < best * 0.98 + 1, "what a second launch is worth"
    front_rows, front_ns = said[0][1], said[0][-1]
    assert front_rows % 128 == 0 and front_ns == least_estimate(program, m, front_rows, k, sms)
    *_, token_tiles, row_pairs, blocks, clusters, pairs, parts, slices, _, _ = said[1]
    assert (blocks, parts, slices, pairs) == (2, 1, 2, token_tiles * row_pairs), "no tile of the last is shared out"
    assert clusters == min(pairs, sms // 2)
    assert -pairs % (sms // 2) < token_tiles, "full waves, but for what is less than a row of tiles"
    return 2


@QUICK
@given(
    m=st.integers(1, 6000),
    n=st.integers(1, 20_000),
    tiles=st.integers(1, 300),
    sms=st.sampled_from([1, 16, 78, 114, 132]),
)
def test_one_launch_or_two(program, m, n, tiles, sms):
    k = tiles * 64
    (answer,) = ask(program, [f"launches {m} {n} {k} {sms} {SHARED}"])
    check_launches(program, answer, m, n, k, sms)


def test_two_launches_where_a_wave_would_be_nearly_empty(program):
    for spec, m, slices in TWO_LAUNCHES:
        (answer,) = ask(program, [f"launches {m} {spec.n} {spec.k} {SMS} {SHARED}"])
        assert check_launches(program, answer, m, spec.n, spec.k, SMS) == 2
        *_, blocks, _, pairs, parts, _, _, _ = numbers(answer.split(";")[1])
        assert slices == (1 if pairs else FOUR_BY_TWO if parts == 2 else blocks), answer


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_every_token_is_copied_once_or_twice_and_none_beyond_the_last(program, shape):
    width = int(SHAPES[shape][0])
    asked = [(m, 1) for m in (*range(1, width + 20), 2 * width - 1, 2 * width, 5 * width + 1, 100_003)]
    asked += [(m, 2) for m in (1, width - 9, width, width + 1, 3 * width + 5)]
    answers = ask(program, [f"tokens {shape} {m} {parts}" for m, parts in asked])
    for answer, (m, parts) in zip(answers, asked, strict=True):
        half, second, *firsts = numbers(answer)
        assert half % 8 == 0 and second % 8 == 0 and 0 <= half - second <= 8, "no gap, and whole rows of the swizzle"
        copied = half + second
        assert len(firsts) == -(-m // width)
        for tile, first in enumerate(firsts):
            own = range(tile * width, min(tile * width + width, m))
            assert first <= own.start and own.stop <= first + copied
            assert first + copied <= m or (tile == 0 and m <= width)
        if m < width and parts == 1:
            assert copied < m + 8
        else:
            assert copied == width


NUMBERS = st.one_of(st.integers(0, 2**31 - 1), st.sampled_from([0, 1, 2**31 - 1]))


@QUICK
@given(n=NUMBERS, divisor=st.one_of(st.integers(1, 5), st.integers(1, 2**31 - 1)), near=st.integers(-1, 1))
def test_division_without_dividing(program, n, divisor, near):
    near_multiple = min(max(n // divisor * divisor + near, 0), 2**31 - 1)
    answers = ask(program, [f"divide {value} {divisor}" for value in (n, near_multiple)])
    assert answers == [f"{value // divisor} {value // divisor}" for value in (n, near_multiple)]


@pytest.mark.parametrize("slices", [1, 2, FOUR_BY_TWO])
def test_costs_of_the_longest_rows_that_are_taken(program, slices):
    """In 64 bits: an estimate that turned negative would beat everything."""
    shape = [tokens for tokens, *_ in SHAPES].index("256")
    short, long = (f"estimate {question(shape, 256, 4096, k, slices=slices)}" for k in (2**20, 2**30 - 64))
    a, b = (int(answer) for answer in ask(program, [short, long]))
    assert 0.9 < b / a / 2**10 < 1.1


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_real_models_fit(program, shape):
    shapes = (
        (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (128256, 4096),
        (1024, 4096), (576, 1536),
    )  # fmt: skip
    asked = [(m, n, k, s) for n, k in shapes for m in (65, 128, 512, 4096) for s in range(1, FOUR_BY_TWO + 1)]
    answers = ask(program, [question(shape, m, n, k, slices=s) for m, n, k, s in asked])
    for answer, (m, n, k, slices) in zip(answers, asked, strict=True):
        if slices == 1 or answer != "none":
            check_walk(answer, m, n, k, SMS, slices)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_the_first_use_check_slices_in_every_way(program, shape):
    """Pairs alone, clusters of two, three and four, and two clusters that meet, where the shape can."""
    checked = [
        question(shape, selfcheck.TOKENS[0], spec.n, spec.k, slices=cut)
        for spec in selfcheck.SPECS[FourBitSpec]
        for cut in selfcheck.CUTS
    ]
    plans = [numbers(answer.split(";")[0]) for answer in ask(program, checked) if answer != "none"]
    ways = {(blocks, pairs > 0, parts) for *_, blocks, _, pairs, parts, _, _, _, _ in plans}
    special = {3: (3, False, 1), 4: (4, False, 1), FOUR_BY_TWO: (2, False, 2)}
    possible = ask(program, [question(shape, 1, 64, 4096, slices=slices) for slices in special])
    can = {way for way, answer in zip(special.values(), possible, strict=True) if answer != "none"}
    assert ways == {(2, True, 1), (2, False, 1)} | can


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_100_000_tokens_and_weights_beyond_two_to_the_33(program, shape):
    for m, n, k in ((100_003, 4096, 4096), (100, 131_088, 65_536), (2**20, 2**20, 64)):
        (answer,) = ask(program, [question(shape, m, n, k, sms=4)])
        tokens, block_rows, k_tiles, token_tiles, row_pairs, *_ = numbers(answer.split(";")[0])
        assert (k_tiles, token_tiles, row_pairs) == (k // 64, -(-m // tokens), -(-n // (2 * block_rows)))


def test_what_does_not_fit_is_refused(program):
    asked = [
        question(3, 2**31, 128, 64),
        question(3, 1, 2**31, 64),
        question(3, 1, 128, 2**31),
        question(3, 2**30, 2**30, 64),  # more output tiles than 32-bit indices count
        question(3, 512, 4096, 4096, shared=101376),
        question(3, 1, 64, 4096, slices=FOUR_BY_TWO + 1),
        question(3, 1, 64, 4096, slices=FOUR_BY_TWO),  # of 192 rows
        question(0, 1, 64, 4096, slices=FOUR_BY_TWO),  # of 64 tokens
        question(2, 1, 17 * 256, 4096, slices=FOUR_BY_TWO, sms=300),  # more output tiles than there are counters
        question(2, 1, 64, 960, slices=FOUR_BY_TWO),  # three k tiles a slice
        question(2, 1, 64, 4096, slices=FOUR_BY_TWO, sms=7),
        question(8, 1, 64, 4096, slices=3),  # sums of 320 tokens that leave no room
        question(9, 1, 64, 4096, slices=4),  # of 344
    ]
    assert ask(program, asked) == ["none"] * len(asked)

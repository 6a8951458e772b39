"""How the wgmma engine deals its work, walked on the host: every unit once, blocks that agree on who shares what, and
memory that suffices."""

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nf4linear import selfcheck
from nf4linear.formats import FourBitSpec

HOST = Path(__file__).parent / "host"
CSRC = Path(__file__).parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

SMS, SHARED = 132, 232448  # of an H200
SHAPE_COUNT = 8
MOST_SPREAD = 8
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("wgmma") / "wgmma_plan"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([COMPILER, *flags, str(HOST / "wgmma_plan.cpp"), "-o", str(program)], check=True)
    return program


def ask(program: Path, questions: list[str]) -> list[str]:
    text = "\n".join(questions) + "\n"
    return subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def question(shape, n, k, *, kb_full=None, log2_group=8, nested=1, least=1, sms=SMS, shared=SHARED) -> str:
    return " ".join(map(str, (shape, n, k, kb_full or k // 64, log2_group, nested, least, sms, shared)))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def check_walk(answer: str, n: int, k: int, sms: int, least: int) -> None:
    plan, *blocks = answer.split(";")
    tokens, row_groups, burst, _, bursts, count, shared, workspace = numbers(plan)
    row_blocks = -(-n // (64 * row_groups))
    assert bursts == -(-k // (64 * burst))
    assert len(blocks) == count <= min(sms, 256) and shared <= SHARED
    expected = 0
    done: dict[int, list[tuple[int, int]]] = {}
    met: dict[int, list[int]] = {}
    agreed: dict[int, tuple[int, ...]] = {}
    for block, text in enumerate(blocks):
        stretch, *segments = text.split(",")
        begin, end = numbers(stretch)
        assert begin == expected and end - begin >= min(max(least, 1), row_blocks * bursts)
        expected = end
        for index, segment in enumerate(segments):
            row_block, first, last, *sharers = numbers(segment)
            done.setdefault(row_block, []).append((first, last))
            met.setdefault(row_block, []).append(block)
            assert agreed.setdefault(row_block, tuple(sharers)) == tuple(sharers)
            # A head is what a stretch begins with and a tail what it ends with, so each has its slot and its counter.
            assert first == row_block * bursts or index == 0
            assert last == (row_block + 1) * bursts or index == len(segments) - 1
    assert expected == row_blocks * bursts
    lengths = {end - begin for begin, end in (numbers(text.split(",")[0]) for text in blocks)}
    even = len(lengths) == 1 and bursts % lengths.pop() == 0
    for row_block in range(row_blocks):
        spans = done[row_block]
        assert spans[0][0] == row_block * bursts and spans[-1][1] == (row_block + 1) * bursts
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        owner, stop, spread = agreed[row_block]
        assert met[row_block] == list(range(owner, stop))
        assert spread == (even and 2 <= stop - owner <= MOST_SPREAD)
    cut = any(len(blocks) > 1 for blocks in met.values())
    assert workspace == (count * 2 * tokens * 64 * row_groups * 4 + 1024 if cut else 0)


@QUICK
@given(
    shape=st.integers(0, SHAPE_COUNT - 1),
    n=st.integers(1, 40_000),
    tiles=st.integers(1, 600),
    sms=st.sampled_from([1, 16, 78, 114, 132, 300]),
    least=st.integers(0, 40),
    nested=st.integers(0, 1),
)
def test_every_unit_and_every_slot_once(program, shape, n, tiles, sms, least, nested):
    (answer,) = ask(program, [question(shape, n, tiles * 64, nested=nested, least=least, sms=sms)])
    if answer == "none":
        assert nested, "everything else fits at this size"
    else:
        check_walk(answer, n, tiles * 64, sms, least)


@pytest.mark.parametrize("shape", range(SHAPE_COUNT))
def test_real_models_fit(program, shape):
    shapes = (
        (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672),
        (128256, 4096), (256000, 8192), (1024, 4096), (576, 1536),
    )  # fmt: skip
    asked = [question(shape, n, k, nested=nested) for n, k in shapes for nested in (0, 1)]
    for answer, (n, k) in zip(ask(program, asked), [s for s in shapes for _ in (0, 1)], strict=True):
        assert answer != "none", (n, k)
        check_walk(answer, n, k, SMS, 1)


@pytest.mark.parametrize("shape", range(SHAPE_COUNT))
def test_more_weights_than_two_to_the_33(program, shape):
    """With plain absmax; the second-level scales of so many rows do not fit beside the rings."""
    (answer,) = ask(program, [question(shape, 131088, 65536, nested=0)])
    check_walk(answer, 131088, 65536, SMS, 1)


@pytest.mark.parametrize(
    ("shape", "n", "k", "blocks"),
    [(4, 4096, 4096, 128), (4, 4096, 14336, 128), (4, 8192, 8192, 128), (5, 6144, 4096, 128), (4, 6144, 4096, 132)],
)
def test_stretches_divide_a_row_block_where_that_costs_little(program, shape, n, k, blocks):
    """128 of 132 SMs, where the longest of 132 stretches is as long, or a sixteenth shorter."""
    (answer,) = ask(program, [question(shape, n, k, least=2)])
    plan, *texts = answer.split(";")
    assert numbers(plan)[5] == len(texts) == blocks
    assert all(numbers(text.split(",")[1])[-1] == (blocks == 128) for text in texts)


@pytest.mark.parametrize("shape", range(SHAPE_COUNT))
def test_the_first_use_check_adds_up_in_every_way(program, shape):
    """A block alone, the owner of a row block for all, and all its sharers, as many as that can be."""
    asked = [
        question(shape, s.n, s.k, log2_group=(s.blocksize * 4).bit_length() - 1, nested=int(s.double_quant), least=cut)
        for s in selfcheck.SPECS[FourBitSpec]
        for cut in selfcheck.CUTS
    ]
    blocks = [block for answer in ask(program, asked) for block in answer.split(";")[1:]]
    sharers = [numbers(segment)[3:] for block in blocks for segment in block.split(",")[1:]]
    ways = {(stop - owner, spread) for owner, stop, spread in sharers}
    assert {(1, 0), (MOST_SPREAD, 1)} <= ways and any(count > 1 and not spread for count, spread in ways)


def test_what_does_not_fit_is_refused(program):
    asked = [
        question(4, 1 << 30, 4096),  # more blocks than 32-bit indices count
        question(4, 1 << 20, 4096, kb_full=1 << 14),  # so has the weight that this is a shard of
        question(4, 16, 1 << 31),
        question(4, 4096, 4096, shared=101376),
    ]
    assert ask(program, asked) == ["none"] * len(asked)


@QUICK
@given(
    shape=st.integers(0, SHAPE_COUNT - 1),
    rows=st.integers(1, 3000),
    tiles=st.integers(16, 200),
    extra=st.integers(0, 900),
)
def test_second_level_scales_fit_into_their_place(program, shape, rows, tiles, extra):
    """Shared memory ends with the groups that a stretch meets, wherever the shard lies."""
    kb_full = tiles + extra
    (answer,) = ask(program, [question(shape, rows, tiles * 64, kb_full=kb_full)])
    if answer == "none":
        return
    plan, *blocks = answer.split(";")
    tokens, row_groups, burst, stages, bursts, _, shared, _ = numbers(plan)
    block_rows = 64 * row_groups
    most = 0
    for text in blocks:
        begin, end = numbers(text.split(",")[0])
        met = (end - 1) // bursts - begin // bursts + 1
        # One group more at each end: the first block of a stretch may lie anywhere in its group.
        most = max(most, ((255 + (met * block_rows - 1) * kb_full + tiles - 1) >> 8) + 1)
    tables = 65536 + 1024 + 4 * row_groups * burst * 64 + 32
    stage = burst * tokens * 128 + row_groups * 4 * (burst * 512 + 64)
    assert shared - (tables + stages * (stage + 16)) >= most * 4

"""How the 8-bit Hopper engines deal their work, walked on the host: every unit once, blocks that agree on who shares
what, and memory that suffices."""

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nf4linear import selfcheck
from nf4linear.bench.linear_w8 import TUNE_GEMM_SHAPES, TUNE_WGMMA_SHAPES
from nf4linear.formats import EightBitSpec

HOST = Path(__file__).parent / "host"
CSRC = Path(__file__).parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

SMS, SHARED = 132, 232448  # of an H200
MOST_SPREAD = 8
REAL = (
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672),
    (128256, 4096), (256000, 8192), (1024, 4096), (576, 1536),
)  # fmt: skip
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("w8") / "w8_plan"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([COMPILER, *flags, str(HOST / "w8_plan.cpp"), "-o", str(program)], check=True)
    return program


def ask(program: Path, *questions: tuple) -> list[str]:
    text = "".join(" ".join(map(str, question)) + "\n" for question in questions)
    return subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def pieces_of(answer: str) -> tuple[list[int], list[list[list[int]]]]:
    """The plan's numbers, and those of every piece of every block."""
    plan, *blocks = answer.split(";")
    return list(map(int, plan.split())), [[list(map(int, p.split())) for p in b.split(",")[1:]] for b in blocks]


# ---- up to 64 tokens -------------------------------------------------------------------------------------------------


def check_wgmma(answer: str, n: int, k: int, sms: int, least: int) -> None:
    (tokens, row_groups, bursts, count, shared, workspace), blocks = pieces_of(answer)
    row_blocks = -(-n // (64 * row_groups))
    assert len(blocks) == count <= min(sms, 256) and shared <= SHARED
    lengths = [pieces[-1][2] - pieces[0][1] for pieces in blocks]
    assert min(lengths) >= min(max(least, 1), row_blocks * bursts) and max(lengths) <= min(lengths) + 1
    pieces = [piece for pieces in blocks for piece in pieces]
    assert pieces[0][1] == 0 and pieces[-1][2] == row_blocks * bursts
    assert all(a[2] == b[1] for a, b in pairwise(pieces))
    # A head is what a stretch begins with and a tail what it ends with, so each has its slot and its counter.
    assert all(p[1] == p[0] * bursts for pieces in blocks for p in pieces[1:])
    even = len(set(lengths)) == 1 and bursts % lengths[0] == 0
    shares = False
    for row_block in range(row_blocks):
        met = [block for block, pieces in enumerate(blocks) if any(p[0] == row_block for p in pieces)]
        (owner, stop, spread), *others = {tuple(p[3:]) for p in pieces if p[0] == row_block}
        assert not others and met == list(range(owner, stop))
        assert spread == (even and 2 <= len(met) <= MOST_SPREAD)
        shares |= len(met) > 1
    assert workspace == (count * 2 * tokens * 64 * row_groups * 4 + 1024 if shares else 0)


@QUICK
@given(
    shape=st.integers(0, len(TUNE_WGMMA_SHAPES) - 1),
    n=st.integers(1, 40_000),
    tiles=st.integers(1, 600),
    sms=st.sampled_from([1, 16, 78, 114, 132, 300]),
    least=st.integers(0, 40),
)
def test_few_tokens_every_unit_once(program, shape, n, tiles, sms, least):
    (answer,) = ask(program, ("wgmma", shape, n, tiles * 64, least, sms, SHARED))
    check_wgmma(answer, n, tiles * 64, sms, least)


@pytest.mark.parametrize("shape", range(len(TUNE_WGMMA_SHAPES)))
def test_few_tokens_real_models(program, shape):
    answers = ask(program, *(("wgmma", shape, n, k, 2, SMS, SHARED) for n, k in REAL))
    for answer, (n, k) in zip(answers, REAL, strict=True):
        check_wgmma(answer, n, k, SMS, 2)


@pytest.mark.parametrize("grouped", [False, True], ids=["row scales", "group scales"])
@pytest.mark.parametrize("shape", range(len(TUNE_WGMMA_SHAPES)))
def test_the_first_use_check_adds_up_in_every_way(program, shape, grouped):
    """A block alone, the owner of a row block for all, and all its sharers, as many as that can be: both kernels."""
    specs = [s for s in selfcheck.SPECS[EightBitSpec] if bool(s.group_size) == grouped]
    answers = ask(program, *(("wgmma", shape, s.n, s.k, cut, SMS, SHARED) for s in specs for cut in selfcheck.CUTS))
    pieces = [piece for answer in answers for block in pieces_of(answer)[1] for piece in block]
    ways = {(stop - owner, spread) for *_, owner, stop, spread in pieces}
    assert {(1, 0), (MOST_SPREAD, 1)} <= ways and any(count > 1 and not spread for count, spread in ways)


# ---- more tokens -----------------------------------------------------------------------------------------------------


def check_gemm(answer: str, m: int, n: int, k: int, sms: int) -> None:
    (tokens, consumers, k_tiles, token_tiles, row_blocks, count, whole, shared, workspace), blocks = pieces_of(answer)
    assert k_tiles == k // 64 and token_tiles == -(-m // tokens) and row_blocks == -(-n // (64 * consumers))
    assert len(blocks) == count <= min(sms, 256) and shared <= SHARED
    spans: dict[int, list[tuple[int, int, int]]] = {}
    places = {}
    for block, pieces in enumerate(blocks):
        for index, (tile, begin, end, token_tile, row_block, first, stop) in enumerate(pieces):
            spans.setdefault(tile, []).append((begin, end, block))
            assert places.setdefault(tile, (token_tile, row_block)) == (token_tile, row_block)
            # One slot a block: only its first piece of the line can be one that another block collects, only its last
            # one can wait.
            assert begin == 0 or all(p[0] < whole for p in pieces[:index])
            assert stop == first or index == len(pieces) - 1
    assert sorted(spans) == list(range(token_tiles * row_blocks))
    assert len(set(places.values())) == len(places)
    assert all(0 <= t < token_tiles and 0 <= r < row_blocks for t, r in places.values())
    for tile, parts in spans.items():
        assert parts[0][0] == 0 and parts[-1][1] == k_tiles and all(a[1] == b[0] for a, b in pairwise(parts))
        assert tile >= whole or len(parts) == 1
        sharers = [block for *_, block in parts]
        assert sharers == list(range(sharers[0], sharers[-1] + 1))
        owner = next(p for p in blocks[sharers[0]] if p[0] == tile)
        assert list(range(*owner[5:])) == sharers[1:], "the owner collects what the others left"
    assert (workspace == 0) == (whole == len(spans))
    assert workspace == 0 or workspace == count * tokens * 64 * consumers * 4 + 1024


@QUICK
@given(
    shape=st.integers(0, len(TUNE_GEMM_SHAPES) - 1),
    m=st.integers(1, 3000),
    n=st.integers(1, 20_000),
    tiles=st.integers(1, 200),
    cut=st.integers(0, 1),
    sms=st.sampled_from([1, 16, 78, 114, 132, 300]),
)
def test_many_tokens_every_k_tile_once(program, shape, m, n, tiles, cut, sms):
    (answer,) = ask(program, ("gemm", shape, m, n, tiles * 64, cut, sms, SHARED))
    assert answer != "none" or cut, "whole output tiles always fit"
    if answer != "none":
        check_gemm(answer, m, n, tiles * 64, sms)


@pytest.mark.parametrize("shape", range(len(TUNE_GEMM_SHAPES)))
def test_many_tokens_real_models(program, shape):
    asked = [(m, n, k, cut) for n, k in REAL for m in (65, 128, 1000, 3456) for cut in (0, 1)]
    answers = ask(program, *(("gemm", shape, *case, SMS, SHARED) for case in asked))
    for answer, (m, n, k, cut) in zip(answers, asked, strict=True):
        assert answer != "none" or cut
        if answer != "none":
            check_gemm(answer, m, n, k, SMS)


def test_what_does_not_fit_is_refused(program):
    asked = (
        ("wgmma", 0, 1 << 31, 4096, 1, SMS, SHARED), ("wgmma", 0, 4096, 1 << 31, 1, SMS, SHARED),
        ("wgmma", 0, 1 << 30, 1 << 20, 1, SMS, SHARED), ("wgmma", 0, 4096, 4096, 1, SMS, 101376),
        ("gemm", 0, 1 << 31, 4096, 4096, 1, SMS, SHARED), ("gemm", 0, 1 << 28, 1 << 28, 4096, 0, SMS, SHARED),
        ("gemm", 0, 128, 4096, 4096, 1, SMS, 101376),
    )  # fmt: skip
    assert ask(program, *asked) == ["none"] * len(asked)

"""How two clusters that share an output tile exchange their sums (GemmMeeting of csrc/gemm_wgmma_finish.cuh): a model
of one warpgroup of each of the four blocks, walked through every order in which they can act. Nobody waits in a circle
or for a cluster that has not started, each half of the tokens is stored once, and the counters end at zero."""

import random
import re
from pathlib import Path

import pytest

SOURCE = (Path(__file__).parents[1] / "csrc" / "gemm_wgmma_finish.cuh").read_text()
LAG = int(re.search(r"constexpr int LAG = (\d);", SOURCE).group(1))
BLOCKS = [(part, rank) for part in range(2) for rank in range(2)]

Op = tuple[str, int]
State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # next ops, what the blocks got, counters


def program(part: int, rank: int, steps: int) -> list[Op]:
    """What a block does behind its k tiles, in order."""
    half_steps = steps // 2
    ops: list[Op] = [("ask", part)]
    for turn in range(steps + LAG):
        if turn < steps and turn % 2 != rank:
            ops.append(("send", turn))
        step = turn - LAG
        if step >= 0 and step % 2 == rank:
            half, within = step // half_steps ^ part, step % half_steps
            ops.append(("collect", step))
            if within < 2:
                ops.append(("enter", half))
            if within >= half_steps - 2:
                ops.append(("leave", half))
                if step < half_steps:
                    ops.append(("ask", half ^ 1))
    return ops


def advance(programs: list[list[Op]], state: State, block: int) -> tuple[State, Op] | None:
    """The state behind the block's next op, or None where it ends or waits."""
    at, got, counters = state
    if at[block] == len(programs[block]):
        return None
    part, rank = BLOCKS[block]
    op, argument = programs[block][at[block]]
    counter = rank * 2 + argument if op in ("ask", "enter", "leave") else 0
    value, ticket = counters[counter], got[block]
    if op == "collect":
        neighbour = BLOCKS.index((part, 1 - rank))
        if ("send", argument) not in programs[neighbour][: at[neighbour]]:
            return None
    elif op == "ask":
        ticket, value = value, value + 1
    elif op == "enter" and ticket:
        if value < 4:
            return None
        value = 0
    elif op == "leave" and not ticket:
        value += 2
    step = (
        tuple(n + (b == block) for b, n in enumerate(at)),
        tuple(ticket if b == block else n for b, n in enumerate(got)),
        tuple(value if c == counter else n for c, n in enumerate(counters)),
    )
    return step, (op, argument)


@pytest.mark.parametrize("steps", [4, 8])
def test_every_order_ends_well(steps):
    programs = [program(part, rank, steps) for part, rank in BLOCKS]
    ends = tuple(map(len, programs))
    start: State = ((0,) * 4, (0,) * 4, (0,) * 4)
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        after = [found for block in range(4) if (found := advance(programs, state, block))]
        if not after:
            assert state[0] == ends, "they wait for each other"
            assert state[2] == (0,) * 4
        for part in range(2):  # of which the other has not started
            if not any(state[0][block] for block in range(4) if BLOCKS[block][0] != part):
                mine = [block for block in range(4) if BLOCKS[block][0] == part]
                done = all(state[0][block] == ends[block] for block in mine)
                assert done or any(advance(programs, state, block) for block in mine)
        for step, _ in after:
            if step not in seen:
                seen.add(step)
                waiting.append(step)
    assert len(seen) > 1000


@pytest.mark.parametrize("steps", [4, 8])
def test_one_brings_and_one_adds(steps):
    """By random orders: of each half and rank one block adds, behind the other's bringing."""
    programs = [program(part, rank, steps) for part, rank in BLOCKS]
    for seed in range(300):
        draw = random.Random(seed)
        state: State = ((0,) * 4, (0,) * 4, (0,) * 4)
        brought, added = set(), set()
        while able := [block for block in range(4) if advance(programs, state, block)]:
            block = draw.choice(able if draw.random() < 0.5 else able[:1] if seed % 2 else able[-1:])
            ticket = state[1][block]
            state, (op, argument) = advance(programs, state, block)
            key = (BLOCKS[block][1], argument)
            if op == "leave" and not ticket:
                assert key not in brought
                brought.add(key)
            if op == "enter" and ticket:
                assert key in brought and key not in added
                added.add(key)
        assert brought == added == {(rank, half) for rank in range(2) for half in range(2)}

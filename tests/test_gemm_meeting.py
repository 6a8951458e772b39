"""How two clusters that share an output tile exchange their sums (GemmMeeting of csrc/gemm_wgmma_finish.cuh): a model
of the two warpgroups of each of the four blocks. Nobody waits in a circle or for a cluster that has not started, each
half of the tokens is brought once and added once, and the counters end at zero.

What a warpgroup does, other than asking who brings, only ever lets others go on. So it does not matter when it does it,
and all orders of the questions are all orders.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = (Path(__file__).parents[1] / "csrc" / "gemm_wgmma_finish.cuh").read_text()
LAG = int(re.search(r"constexpr int LAG = (\d);", SOURCE).group(1))
ACTORS = [(part, rank, warpgroup) for part in range(2) for rank in range(2) for warpgroup in range(2)]

Op = tuple[str, int]


def program(part: int, rank: int, steps: int) -> list[Op]:
    """What a warpgroup does behind its k tiles, in order."""
    half_steps = steps // 2
    ops: list[Op] = [("ask", part), ("barrier", 0)]
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


class State(NamedTuple):
    at: tuple[int, ...]  # each actor's next op
    got: tuple[int, ...]  # what it was answered last
    counters: tuple[int, ...]  # of (rank, half, warpgroup)
    log: frozenset  # (what, rank, half, warpgroup): brought, added


class Model:
    def __init__(self, steps: int):
        self.programs = [program(part, rank, steps) for part, rank, _ in ACTORS]
        self.start = State((0,) * 8, (0,) * 8, (0,) * 8, frozenset())
        self.ends = tuple(map(len, self.programs))

    def op(self, state: State, actor: int) -> Op:
        at = state.at[actor]
        return self.programs[actor][at] if at < self.ends[actor] else ("end", 0)

    def act(self, state: State, actor: int) -> State | None:
        """The state behind the actor's next op; None where it has ended or waits."""
        part, rank, warpgroup = ACTORS[actor]
        op, argument = self.op(state, actor)
        counter = rank * 4 + argument % 2 * 2 + warpgroup
        value, ticket, log = state.counters[counter], state.got[actor], state.log
        if op == "end":
            return None
        if op == "barrier":  # of the cluster
            if any(state.at[other] == 0 for other in range(8) if ACTORS[other][0] == part):
                return None
        elif op == "collect":  # one barrier for what both warpgroups of the neighbour send
            for other in range(8):
                sent = self.programs[other][: state.at[other]]
                if ACTORS[other][:2] == (part, 1 - rank) and ("send", argument) not in sent:
                    return None
        elif op == "ask":
            ticket, value = value, value + 1
        elif op == "enter" and ticket:
            if value < 4:
                return None
            assert ("brought", rank, argument, warpgroup) in log
            value, log = 0, log | {("added", rank, argument, warpgroup)}
        elif op == "leave" and not ticket:
            assert ("brought", rank, argument, warpgroup) not in log
            value, log = value + 2, log | {("brought", rank, argument, warpgroup)}

        def put(values: tuple[int, ...], index: int, new: int) -> tuple[int, ...]:
            return (*values[:index], new, *values[index + 1 :])

        return State(
            put(state.at, actor, state.at[actor] + 1), put(state.got, actor, ticket),
            put(state.counters, counter, value), log,
        )  # fmt: skip

    def settle(self, state: State, actors: range | list[int] = range(8)) -> State:
        """Everything done but questions."""
        moved = True
        while moved:
            moved = False
            for actor in actors:
                while self.op(state, actor)[0] != "ask" and (after := self.act(state, actor)):
                    state, moved = after, True
        return state


@pytest.mark.parametrize("steps", [4, 8])
def test_every_order_ends_well(steps):
    model = Model(steps)
    seen, waiting = {model.start}, [model.start]
    while waiting:
        state = waiting.pop()
        asking = [actor for actor in range(8) if model.op(state, actor)[0] == "ask"]
        if not asking:
            assert state.at == model.ends, "they wait for each other"
            assert state.counters == (0,) * 8
            assert len(state.log) == 16, "each half of each rank and warpgroup brought and added"
        for actor in asking:
            after = model.settle(model.act(state, actor))
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    assert len(seen) > 1000


@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.parametrize("part", [0, 1])
def test_a_cluster_does_not_wait_for_one_that_has_not_started(steps, part):
    model = Model(steps)
    mine = [actor for actor in range(8) if ACTORS[actor][0] == part]
    state = model.start
    while asking := [actor for actor in mine if model.op(state, actor)[0] == "ask"]:
        state = model.settle(model.act(state, asking[0]), mine)
    assert all(state.at[actor] == model.ends[actor] for actor in mine)

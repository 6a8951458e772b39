"""Tests of what may happen around a launch, for every engine: a file imports those that it wants.

They run over the file's own fixtures: `library`, and `ordered`, which gives (spec, packed, tokens, flags) of calls
whose blocks leave sums to each other in all the ways that the engine has.
"""

import pytest
import torch
from fused import DEPENDENT, PLAIN, capture, launch

from nf4linear import reorder
from nf4linear.formats import FourBitSpec
from operands import fresh_weight


def activations(tokens, spec):
    return torch.randn(tokens, spec.k, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("extra", [PLAIN, DEPENDENT])
def test_waits_for_the_kernel_that_writes_the_activations(ordered, library, extra):
    spec, packed, tokens, flags = ordered
    source = activations(tokens, spec)
    want = launch(library, spec, packed, source, flags)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            x = torch.zeros_like(source)
            torch.cuda._sleep(200_000)
            torch.add(source, 0, out=x)
            assert torch.equal(launch(library, spec, packed, x, flags | extra), want)


def test_two_streams_at_once(ordered, library):
    spec, packed, tokens, flags = ordered
    inputs = [activations(tokens, spec) for _ in range(2)]
    want = [launch(library, spec, packed, x, flags) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(launch(library, spec, packed, inputs[i], flags | DEPENDENT))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want[i]) for i in (0, 1) for y in got[i])


@pytest.mark.parametrize("extra", [PLAIN, DEPENDENT])
def test_graphs_replay_on_new_inputs(ordered, library, extra):
    spec, packed, tokens, flags = ordered
    x = activations(tokens, spec)
    launch(library, spec, packed, x, flags)
    graph, outputs = capture([lambda: launch(library, spec, packed, x, flags | extra)] * 8)
    for _ in range(5):
        fresh = torch.randn_like(x)
        x.copy_(fresh)
        graph.replay()
        want = launch(library, spec, packed, fresh, flags)
        assert all(torch.equal(y, want) for y in outputs)


def test_two_graphs_at_once(ordered, library):
    spec, packed, tokens, flags = ordered
    inputs = [activations(tokens, spec) for _ in range(2)]
    want = [launch(library, spec, packed, x, flags) for x in inputs]
    graphs = [capture([lambda x=x: launch(library, spec, packed, x, flags | DEPENDENT)] * 16) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(100):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, want[i]) for i in (0, 1) for y in graphs[i][1])


def check_chain(library, tokens, flags):
    """Dependent launches in a row: each reads what the one before it wrote, and all use the same counters."""
    spec = FourBitSpec("nf4", 1024, 1024)
    packed = reorder.pack(spec, fresh_weight(spec, device="cuda"))
    ends = []
    for extra in (PLAIN, DEPENDENT):
        y = torch.randn(tokens, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).half()
        for _ in range(60):
            for _ in range(3):
                y = launch(library, spec, packed, y / 32, flags | extra)
            y /= y.abs().amax()
        ends.append(y)
    assert torch.equal(*ends) and ends[0].isfinite().all()

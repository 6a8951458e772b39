"""The fused kernels for few tokens: exact where they can be, as accurate as dequantize + GEMM elsewhere, and safe
inside streams and graphs.

What a fused kernel computes, with T the 16-bit type of x and all sums in float32:

    y = round_T(sum over blocks of scale * (sum over the block of round_T(centroid) * x) + bias)

So a single input of 1 gives round_T(round_T(centroid) * scale), exactly.
"""

import pytest
import torch
from fused import (
    DEPENDENT,
    DTYPES,
    PLAIN,
    ROUNDING,
    any_weight,
    launch,
    random_weight,
    relative_error,
    rounded_centroids,
    written_alone,
)
from order_of_work import (  # noqa: F401
    check_chain,
    test_graphs_replay_on_new_inputs,
    test_two_graphs_at_once,
    test_two_streams_at_once,
    test_waits_for_the_kernel_that_writes_the_activations,
)

from nf4linear import native, ops, reference, reorder
from nf4linear.bench.linear import TUNE_SHAPES as SHAPES  # (row tiles, tokens); tests/test_bench_linear.py holds it
from nf4linear.formats import FourBitSpec
from nf4linear.native import tuned
from operands import cut_shard, fresh_weight, geometry, operands, spec_id

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SPECS = (
    FourBitSpec("nf4", 48, 192),  # fewer tiles than a burst
    FourBitSpec("nf4", 1000, 576),  # ragged rows, a burst of one tile
    FourBitSpec("nf4", 33, 1088),
    FourBitSpec("nf4", 5, 64),
    FourBitSpec("fp4", 200, 640),
    FourBitSpec("nf4", 272, 1024, blocksize=128),
    FourBitSpec("fp4", 96, 4096, blocksize=4096),
    FourBitSpec("nf4", 130, 704, double_quant=False),
    FourBitSpec("fp4", 48, 2048, blocksize=512, double_quant=False),
)


@pytest.fixture(scope="module", params=SPECS, ids=spec_id)
def weight(request):
    return any_weight(request.param)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 16, 32])
def test_identity_activations_give_the_decoded_weight(weight, library, dtype, tokens):
    spec, canonical, packed = weight
    want = rounded_centroids(spec, canonical, dtype).to(dtype)
    step = spec.k // 64 if tokens == 1 else tokens  # one token: some columns of every kind
    for first in range(0, spec.k - tokens + 1, step):
        x = torch.zeros(tokens, spec.k, device="cuda", dtype=dtype)
        x[torch.arange(tokens), first + torch.arange(tokens)] = 1
        got = launch(library, spec, packed, x)
        assert torch.equal(got.T, want[:, first : first + tokens]), first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64])
def test_error_is_that_of_dequantize_and_gemm(weight, dtype, tokens):
    spec, canonical, packed = weight
    x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
    bias = torch.randn(spec.n, device="cuda").to(dtype)
    exact = x.double() @ reference.dequantize(spec, canonical, torch.float32).double().T + bias.double()
    got = ops.linear(x, *operands(spec, packed), bias, *geometry(spec))
    gemm = torch.nn.functional.linear(x, reference.dequantize(spec, canonical, dtype), bias)
    # The mean of few values is luck: there each may be off by one rounding more.
    allowance, more = (1.15, 1e-4) if got.numel() > 1000 else (2.5, torch.finfo(dtype).eps / 2)
    assert relative_error(got, exact) <= allowance * relative_error(gemm, exact) + more
    assert torch.equal(got, ops.linear(x, *operands(spec, packed), bias, *geometry(spec))), "two calls differ"
    without = ops.linear(x, *operands(spec, packed), None, *geometry(spec))
    assert relative_error(without, exact - bias.double()) <= 1.5e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "slices"), [(s, k) for s in range(len(SHAPES)) for k in (1, 2, 3, 7)])
def test_every_shape_and_every_cut(weight, library, dtype, shape, slices):
    """Also plain and dependent launches, bit for bit, and all numbers of tokens around the ends of the shape."""
    spec, canonical, packed = weight
    exact_weight = rounded_centroids(spec, canonical, dtype).double()
    most = SHAPES[shape][1]
    for tokens in {1, most // 2 + 1, most}:
        x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
        got = launch(library, spec, packed, x, tuned(shape, slices))
        assert got is not None
        assert relative_error(got, x.double() @ exact_weight.T) < ROUNDING[dtype]
        for flags in (PLAIN, DEPENDENT):
            assert torch.equal(got, launch(library, spec, packed, x, tuned(shape, slices) | flags))
    x = torch.randn(most + 1, spec.k, device="cuda").to(dtype)
    assert launch(library, spec, packed, x, tuned(shape, slices)) is None


def test_large_shapes(library):
    """Several row groups a warp, groups across warps, slices; every number of tokens."""
    spec = FourBitSpec("nf4", 14336 + 24, 4096 + 64)
    canonical = fresh_weight(spec, device="cuda")
    packed = reorder.pack(spec, canonical)
    exact_weight = rounded_centroids(spec, canonical, torch.bfloat16).double()
    x = torch.randn(32, spec.k, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ exact_weight.T
    for tokens in range(1, 33):
        assert relative_error(launch(library, spec, packed, x[:tokens]), exact[:tokens]) < ROUNDING[torch.bfloat16]
    for shape, (_, most) in enumerate(SHAPES):
        for slices in (1, 4, 16):
            got = launch(library, spec, packed, x[:most], tuned(shape, slices))
            assert relative_error(got, exact[:most]) < ROUNDING[torch.bfloat16]


def test_more_weights_than_two_to_the_33(library):
    spec = FourBitSpec("nf4", 131088, 65536)
    packed = random_weight(spec)
    last = FourBitSpec("nf4", 16, spec.k)
    tile = packed | {"qweight": packed["qweight"][-1:], "absmax_q": packed["absmax_q"][-1:]}
    tile["nested_absmax"] = packed["nested_absmax"][-last.blocks // 256 :]
    canonical = reorder.unpack(last, {name: t.contiguous() for name, t in tile.items()})
    exact_weight = rounded_centroids(last, canonical, torch.float16).double()
    for tokens in (1, 8, 16):
        x = torch.randn(tokens, spec.k, device="cuda").half() / 64
        got = launch(library, spec, packed, x)
        assert relative_error(got[:, -16:], x.double() @ exact_weight.T) < ROUNDING[torch.float16]


@pytest.mark.parametrize("blocksize", [64, 256])
def test_shards_find_their_second_level_scales(library, blocksize):
    """Rows and inputs cut out of a weight: the shard knows where it lies, its tables are those of the whole."""
    spec = FourBitSpec("nf4", 320, 2048, blocksize=blocksize)
    canonical = fresh_weight(spec, device="cuda")
    packed = reorder.pack(spec, canonical)
    whole = rounded_centroids(spec, canonical, torch.float16)
    for (n0, n1), (k0, k1) in (((160, 320), (0, 2048)), ((0, 320), (1024, 2048)), ((32, 288), (512, 1280))):
        shard = cut_shard(spec, packed, (n0, n1), (k0, k1))
        for tokens in (1, 8, 16):
            x = torch.randn(tokens, shard.spec.k, device="cuda").half()
            y = torch.full((tokens, shard.spec.n), torch.nan, device="cuda", dtype=torch.float16)
            assert library.linear(shard.weight, x, None, y)
            assert relative_error(y, x.double() @ whole[n0:n1, k0:k1].double().T) < ROUNDING[torch.float16]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5, 16, 32])
def test_only_the_output_is_written(weight, library, tokens):
    spec, _, packed = weight
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.bfloat16)
    want = launch(library, spec, packed, x)
    described = native.describe_weight(spec, *operands(spec, packed))
    for shift in (0, 1, 7):
        y = written_alone(lambda y: library.linear(described, x, None, y), (tokens, spec.n), shift)
        assert torch.equal(y, want)


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_activations_anywhere(weight, library, tokens):
    """Views that start at any element, rows apart from each other: the operator copies what the kernel cannot read."""
    spec, _, packed = weight
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.float16)
    want = launch(library, spec, packed, x)
    for shift, width in ((1, spec.k + 8), (8, spec.k + 8), (0, spec.k + 3), (5, spec.k + 16)):
        view = torch.empty(tokens, width, device="cuda", dtype=torch.float16)[:, shift % 8 : shift % 8 + spec.k]
        view.copy_(x)
        assert torch.equal(ops.linear(view, *operands(spec, packed), None, *geometry(spec)), want)
    assert torch.equal(ops.linear(x.t().contiguous().t(), *operands(spec, packed), None, *geometry(spec)), want)


# ---- order of work ---------------------------------------------------------------------------------------------------

# (spec, tokens, flags): with one slice, and with several, which share counters and a workspace.
ORDERED = (
    (FourBitSpec("nf4", 4096, 1024), 1, PLAIN),
    (FourBitSpec("nf4", 512, 1024), 4, tuned(2, 4)),
    (FourBitSpec("nf4", 1024, 2048), 16, tuned(5, 8)),
)


@pytest.fixture(scope="module", params=ORDERED, ids=lambda p: f"{p[0].n}-m{p[1]}-{p[2]:x}")
def ordered(request):
    spec, tokens, flags = request.param
    return spec, reorder.pack(spec, fresh_weight(spec, device="cuda")), tokens, flags


@pytest.mark.parametrize("flags", [PLAIN, tuned(2, 4)])
def test_a_chain_of_dependent_launches(library, flags):
    check_chain(library, 4, flags)


def test_more_captures_than_sets_of_counters(library):
    """The library has counters for 4096 captures; later ones clear counters in their workspace."""
    spec = FourBitSpec("nf4", 64, 1024)
    packed = reorder.pack(spec, fresh_weight(spec, device="cuda"))
    x = torch.randn(4, spec.k, device="cuda", dtype=torch.float16)
    want = launch(library, spec, packed, x, tuned(2, 4))
    weight = native.describe_weight(spec, *operands(spec, packed))
    y = torch.empty(4, spec.n, device="cuda", dtype=torch.float16)
    for _ in range(4100):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            library.linear(weight, x, None, y, tuned(2, 4))
    for _ in range(2):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, want)

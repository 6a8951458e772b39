"""The wgmma engine: the same promises as the small-batch engine's (test_small_batch.py), where it takes over.

Its blocks leave partial sums to each other, so the cuts matter: `least` units a block decide where they fall.
"""

import pytest
import torch
from fused import (
    DEPENDENT,
    DTYPES,
    PLAIN,
    ROUNDING,
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
from nf4linear.bench.linear import TUNE_SHAPES, TUNE_WGMMA_SHAPES
from nf4linear.formats import FourBitSpec
from operands import cut_shard, fresh_weight, geometry, operands, spec_id

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]

SPECS = (
    FourBitSpec("nf4", 48, 192),  # one row block, fewer tiles than a burst
    FourBitSpec("nf4", 1000, 576),  # ragged rows, a last burst of one tile
    FourBitSpec("nf4", 33, 1088),
    FourBitSpec("nf4", 5, 64),
    FourBitSpec("nf4", 336, 4096),  # sixteen bursts a row block, odd number of row tiles
    FourBitSpec("nf4", 80, 14336),
    FourBitSpec("fp4", 200, 640),
    FourBitSpec("nf4", 272, 1024, blocksize=128),
    FourBitSpec("fp4", 96, 4096, blocksize=4096),
    FourBitSpec("nf4", 130, 704, double_quant=False),  # a last burst of three tiles
    FourBitSpec("fp4", 48, 2048, blocksize=512, double_quant=False),
)
# Tokens of each shape; they come after those of the small-batch engine.
SHAPES = tuple(tokens for tokens, _ in TUNE_WGMMA_SHAPES)
TOKENS = (17, 31, 32, 33, 48, 64, 65, 96, 100, 128)


def tuned(shape: int, least: int = 1) -> int:
    """Flags that take a shape of this engine, and at least `least` units a block."""
    return native.tuned(len(TUNE_SHAPES) + shape, least)


def of(tokens: int, row_groups: int, least: int = 1) -> int:
    """The same by what the shape is."""
    return tuned(TUNE_WGMMA_SHAPES.index((tokens, row_groups)), least)


def shapes_for(tokens: int) -> list[int]:
    found = [shape for shape, capacity in enumerate(SHAPES) if tokens <= capacity]
    assert found, "no shape takes so many tokens"
    return found


def rounding(dtype: torch.dtype, values: int) -> float:
    """Relative error that rounding the output alone may give to so many values."""
    return ROUNDING[dtype] if values > 1000 else torch.finfo(dtype).eps / 2 * 1.05


@pytest.fixture(scope="module")
def library(library):
    assert "90a" in library.architectures.split(",")
    return library


@pytest.fixture(scope="module", params=SPECS, ids=spec_id)
def weight(request):
    spec = request.param
    canonical = fresh_weight(spec, device="cuda")
    return spec, canonical, reorder.pack(spec, canonical)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_identity_activations_give_the_decoded_weight(weight, library, dtype, shape):
    spec, canonical, packed = weight
    want = rounded_centroids(spec, canonical, dtype).to(dtype)
    tokens = min(SHAPES[shape], spec.k)
    step = tokens if spec.k < 2000 else tokens * 7  # long rows: tiles of every kind
    for first in {*range(0, spec.k - tokens + 1, step), spec.k - tokens}:
        x = torch.zeros(tokens, spec.k, device="cuda", dtype=dtype)
        x[torch.arange(tokens), first + torch.arange(tokens)] = 1
        assert torch.equal(launch(library, spec, packed, x, tuned(shape)).T, want[:, first : first + tokens]), first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_error_is_that_of_dequantize_and_gemm(weight, library, dtype, tokens):
    spec, canonical, packed = weight
    x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
    bias = torch.randn(spec.n, device="cuda").to(dtype)
    exact = x.double() @ reference.dequantize(spec, canonical, torch.float32).double().T + bias.double()
    gemm = torch.nn.functional.linear(x, reference.dequantize(spec, canonical, dtype), bias)
    most = 1.15 * relative_error(gemm, exact) + 1e-4
    for shape in shapes_for(tokens):
        assert relative_error(launch(library, spec, packed, x, tuned(shape), bias), exact) <= most, shape
    got = ops.linear(x, *operands(spec, packed), bias, *geometry(spec))
    assert relative_error(got, exact) <= most
    assert torch.equal(got, ops.linear(x, *operands(spec, packed), bias, *geometry(spec))), "two calls differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_every_shape_and_every_cut(weight, library, dtype, shape):
    """Also plain and dependent launches, bit for bit, and all numbers of tokens around the ends of the shape."""
    spec, canonical, packed = weight
    exact_weight = rounded_centroids(spec, canonical, dtype).double()
    most = SHAPES[shape]
    for tokens in {1, most // 2 + 1, most}:
        x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
        exact = x.double() @ exact_weight.T
        for least in (1, 2, 3, 7, 100):
            got = launch(library, spec, packed, x, tuned(shape, least))
            assert got is not None
            assert relative_error(got, exact) < rounding(dtype, got.numel())
            for flags in (PLAIN, DEPENDENT):
                assert torch.equal(got, launch(library, spec, packed, x, tuned(shape, least) | flags))
    x = torch.randn(most + 1, spec.k, device="cuda").to(dtype)
    assert launch(library, spec, packed, x, tuned(shape)) is None


def test_large_shapes(library):
    """Several row blocks a stretch, cuts inside row blocks, rings that go round; every number of tokens."""
    for n, k in ((14336 + 24, 4096 + 64), (2064, 14336)):
        spec = FourBitSpec("nf4", n, k)
        packed = random_weight(spec)
        canonical = reorder.unpack(spec, packed)
        exact_weight = rounded_centroids(spec, canonical, torch.bfloat16).double()
        x = torch.randn(128, spec.k, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ exact_weight.T
        for tokens in (*range(1, 65, 3), 65, 77, 96, 97, 113, 128):
            for shape in shapes_for(tokens):
                got = launch(library, spec, packed, x[:tokens], tuned(shape))
                assert relative_error(got, exact[:tokens]) < 2e-3, (shape, tokens)
        for tokens in TOKENS:
            got = ops.linear(x[:tokens], *operands(spec, packed), None, *geometry(spec))
            assert relative_error(got, exact[:tokens]) < 2e-3, tokens


def test_more_weights_than_two_to_the_33(library):
    """With plain absmax; the second-level scales of so many rows do not fit beside the rings."""
    spec = FourBitSpec("nf4", 131088, 65536, double_quant=False)
    packed = random_weight(spec)
    last = FourBitSpec("nf4", 16, spec.k, double_quant=False)
    tile = packed | {name: packed[name][-1:].contiguous() for name in ("qweight", "absmax")}
    exact_weight = rounded_centroids(last, reorder.unpack(last, tile), torch.float16).double()
    for shape, tokens in enumerate(SHAPES):
        x = torch.randn(tokens, spec.k, device="cuda").half() / 64
        got = launch(library, spec, packed, x, tuned(shape))
        assert relative_error(got[:, -16:], x.double() @ exact_weight.T) < rounding(torch.float16, 16 * tokens)


@pytest.mark.parametrize("blocksize", [64, 256])
def test_shards_find_their_second_level_scales(library, blocksize):
    """Rows and inputs cut out of a weight: the shard knows where it lies, its tables are those of the whole."""
    spec = FourBitSpec("nf4", 640, 2048, blocksize=blocksize)
    canonical = fresh_weight(spec, device="cuda")
    packed = reorder.pack(spec, canonical)
    whole = rounded_centroids(spec, canonical, torch.float16)
    for (n0, n1), (k0, k1) in (((160, 640), (0, 2048)), ((0, 640), (1024, 2048)), ((32, 608), (512, 1792))):
        shard = cut_shard(spec, packed, (n0, n1), (k0, k1))
        for shape, tokens in enumerate(SHAPES):
            x = torch.randn(tokens, shard.spec.k, device="cuda").half()
            y = torch.full((tokens, shard.spec.n), torch.nan, device="cuda", dtype=torch.float16)
            assert library.linear(shard.weight, x, None, y, tuned(shape))
            assert relative_error(y, x.double() @ whole[n0:n1, k0:k1].double().T) < ROUNDING[torch.float16]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_only_the_output_is_written(weight, library, shape):
    spec, _, packed = weight
    tokens = SHAPES[shape] - 3
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.bfloat16)
    want = launch(library, spec, packed, x, tuned(shape))
    assert want.isfinite().all()
    described = native.describe_weight(spec, *operands(spec, packed))
    for shift in (0, 1, 7):
        y = written_alone(lambda y: library.linear(described, x, None, y, tuned(shape)), (tokens, spec.n), shift)
        assert torch.equal(y, want)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_what_shared_memory_held_does_not_matter(library, shape):
    """A launch full of NaN, then one whose last burst is ragged: nothing of the first may be multiplied by zero."""
    bad = FourBitSpec("nf4", 132 * 256, 1024, double_quant=False)
    poison = random_weight(bad)
    poison["absmax"].fill_(torch.nan)
    nans = torch.full((SHAPES[shape], bad.k), torch.nan, device="cuda", dtype=torch.float16)
    for double_quant in (False, True):
        spec = FourBitSpec("nf4", 1000, 832 + 64 * 3, double_quant=double_quant)
        packed = reorder.pack(spec, fresh_weight(spec, device="cuda"))
        spec_ragged = FourBitSpec("nf4", 1000, 832, double_quant=double_quant)
        ragged = reorder.pack(spec_ragged, fresh_weight(spec_ragged, device="cuda"))
        for case, tensors in ((spec, packed), (spec_ragged, ragged)):
            for tokens in (SHAPES[shape] - 1, SHAPES[shape] // 2 - 3, 1):  # all, half or hardly any rows are copied
                x = torch.randn(tokens, case.k, device="cuda", dtype=torch.float16)
                want = launch(library, case, tensors, x, tuned(shape))
                launch(library, bad, poison, nans, tuned(shape))
                got = launch(library, case, tensors, x, tuned(shape))
                assert got.isfinite().all() and torch.equal(got, want), (case, tokens)


@pytest.mark.parametrize("tokens", [17, 40])
def test_activations_anywhere(weight, library, tokens):
    """Views that start at any element, rows apart from each other: the operator copies what the kernel cannot read.

    Small weights at 40 tokens go to the framework's GEMM, which sums in another order for other strides.
    """
    spec, _, packed = weight
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.float16)
    want = ops.linear(x, *operands(spec, packed), None, *geometry(spec))
    for shift, width in ((1, spec.k + 8), (8, spec.k + 8), (0, spec.k + 3), (5, spec.k + 16)):
        view = torch.empty(tokens, width, device="cuda", dtype=torch.float16)[:, shift % 8 : shift % 8 + spec.k]
        view.copy_(x)
        assert relative_error(ops.linear(view, *operands(spec, packed), None, *geometry(spec)), want) < 1e-3
    wide = torch.full((tokens, spec.k + 64), torch.nan, device="cuda", dtype=torch.float16)
    wide[:, : spec.k] = x
    for shape in shapes_for(tokens):
        apart = launch(library, spec, packed, wide[:, : spec.k], tuned(shape))
        assert torch.equal(apart, launch(library, spec, packed, x, tuned(shape)))


# ---- order of work ---------------------------------------------------------------------------------------------------

# (spec, tokens, flags): row blocks that eight blocks share evenly, sixteen, up to seven, four evenly, none, up to four.
ORDERED = (
    (FourBitSpec("nf4", 1024, 2048), 48, of(64, 2)),
    (FourBitSpec("nf4", 512, 4096), 30, of(32, 2)),
    (FourBitSpec("nf4", 1000, 4096), 16, of(16, 4, 3)),
    (FourBitSpec("nf4", 1000, 4096), 17, of(32, 3, 4)),
    (FourBitSpec("nf4", 2048, 1024), 64, of(64, 3, 4)),
    (FourBitSpec("nf4", 6100, 4096), 33, of(64, 2)),
    (FourBitSpec("nf4", 1000, 2048), 128, of(128, 2, 4)),
)


@pytest.fixture(scope="module", params=ORDERED, ids=lambda p: f"{p[0].n}-m{p[1]}-{p[2]:x}")
def ordered(request):
    spec, tokens, flags = request.param
    return spec, random_weight(spec), tokens, flags


@pytest.mark.parametrize("flags", [of(16, 4), of(32, 2), of(64, 2)])
def test_a_chain_of_dependent_launches(library, flags):
    check_chain(library, 16, flags)

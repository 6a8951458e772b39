"""The mma.sync prefill engine: weights bit for bit those of dequantize, sums as accurate as a GEMM's, and nothing but y
written. Tuning flags reach it on every GPU from sm_80 on.

Its blocks leave partial sums to each other, so the cuts matter: every shape is tried with and without them.
"""

import pytest
import torch
from fused import DEPENDENT, DTYPES, PLAIN, PREFILL_SPECS, ROUNDING, launch, random_weight, relative_error
from order_of_work import (  # noqa: F401
    test_graphs_replay_on_new_inputs,
    test_two_graphs_at_once,
    test_two_streams_at_once,
    test_waits_for_the_kernel_that_writes_the_activations,
)

from nf4linear import native, ops, reference, reorder
from nf4linear.bench.linear import TUNE_GEMM_MMA_SHAPES, TUNE_GEMM_SHAPES, TUNE_SHAPES, TUNE_WGMMA_SHAPES
from nf4linear.formats import FourBitSpec
from operands import fresh_weight, geometry, operands, spec_id

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="no GPU from sm_80 on"
    ),
]

# Tokens of GEMM_MMA_SHAPES in csrc/gemm_mma_plan.h, which come after the shapes of the other engines.
SHAPES = TUNE_GEMM_MMA_SHAPES
FIRST_SHAPE = len(TUNE_SHAPES) + len(TUNE_WGMMA_SHAPES) + len(TUNE_GEMM_SHAPES)
CUT, WHOLE = 0, 1


def tuned(shape: int, cut: int = CUT) -> int:
    """Flags that take a compiled shape in place of the launch table's choice."""
    return native.tuned(FIRST_SHAPE + shape, cut)


EVERY_SHAPE = pytest.mark.parametrize("shape", range(len(SHAPES)))


@pytest.fixture(scope="module")
def library():
    found = native.library("cuda")
    assert found, found.why
    return found


@pytest.fixture(scope="module", params=PREFILL_SPECS, ids=spec_id)
def weight(request):
    spec = request.param
    canonical = fresh_weight(spec, seed=torch.randint(2**31, ()).item(), device="cuda")
    return spec, canonical, reorder.pack(spec, canonical)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY_SHAPE
def test_identity_activations_give_the_dequantized_weight(weight, library, dtype, shape):
    spec, canonical, packed = weight
    want = reference.dequantize(spec, canonical, dtype)
    x = torch.eye(spec.k, device="cuda", dtype=dtype)
    for cut in (CUT, WHOLE):
        assert torch.equal(launch(library, spec, packed, x, tuned(shape, cut)).T, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY_SHAPE
def test_error_is_that_of_dequantize_and_gemm(weight, library, dtype, shape):
    spec, canonical, packed = weight
    exact_weight = reference.dequantize(spec, canonical, dtype)
    for tokens in (1, 33, SHAPES[shape] - 1, SHAPES[shape], SHAPES[shape] + 1, 333):
        x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
        bias = torch.randn(spec.n, device="cuda").to(dtype)
        exact = x.double() @ exact_weight.double().T + bias.double()
        gemm = torch.nn.functional.linear(x, exact_weight, bias)
        most = 1.02 * relative_error(gemm, exact) + 1e-5
        for cut in (CUT, WHOLE):
            got = launch(library, spec, packed, x, tuned(shape, cut), bias)
            assert relative_error(got, exact) <= most, (tokens, cut)
            for flags in (PLAIN, DEPENDENT):
                assert torch.equal(got, launch(library, spec, packed, x, tuned(shape, cut) | flags, bias)), tokens


@EVERY_SHAPE
def test_large_shapes(library, shape):
    """Full waves, cut waves, stretches that meet three output tiles, rings that go round."""
    for n, k in ((14336 + 24, 4096 + 64), (2064, 14336), (4096, 4096)):
        spec = FourBitSpec("nf4", n, k)
        packed = random_weight(spec)
        dense = ops.dequantize(*operands(spec, packed), *geometry(spec), torch.bfloat16)
        x = torch.randn(600, spec.k, device="cuda", dtype=torch.bfloat16)
        exact = x.float() @ dense.float().T
        for tokens in (33, 64, 128, 200, 511, 600):
            for cut in (CUT, WHOLE):
                got = launch(library, spec, packed, x[:tokens], tuned(shape, cut))
                assert relative_error(got, exact[:tokens].double()) < 2e-3, (n, k, tokens, cut)


def test_many_tokens_and_outputs_beyond_two_to_the_31(library):
    for tokens, n, k in ((100_003, 1024, 512), (16_500, 131_088, 128)):
        spec = FourBitSpec("nf4", n, k)
        packed = random_weight(spec)
        dense = ops.dequantize(*operands(spec, packed), *geometry(spec), torch.float16)
        x = torch.randn(tokens, k, device="cuda", dtype=torch.float16)
        want = x @ dense.T
        for shape in range(len(SHAPES)):
            got = launch(library, spec, packed, x, tuned(shape))
            for rows in (slice(0, 300), slice(tokens // 2, tokens // 2 + 300), slice(tokens - 300, tokens)):
                assert relative_error(got[rows], want[rows].double()) < 1e-3, (tokens, shape)
            assert torch.allclose(got, want, rtol=0.05, atol=0.5), (tokens, shape)


def test_more_weights_than_two_to_the_33(library):
    spec = FourBitSpec("nf4", 131088, 65536)
    packed = random_weight(spec)
    x = torch.randn(100, spec.k, device="cuda").half() / 64
    dense = ops.dequantize(*operands(spec, packed), *geometry(spec), torch.float16)
    exact = x.double() @ dense[-16:].double().T
    del dense
    for shape in range(len(SHAPES)):
        got = launch(library, spec, packed, x, tuned(shape))
        assert relative_error(got[:, -16:], exact) < ROUNDING[torch.float16]


@pytest.mark.parametrize("blocksize", [64, 256])
def test_shards_find_their_second_level_scales(library, blocksize):
    """Rows and inputs cut out of a weight: the shard knows where it lies, its tables are those of the whole."""
    spec = FourBitSpec("nf4", 640, 2048, blocksize=blocksize)
    canonical = fresh_weight(spec, device="cuda")
    packed = reorder.pack(spec, canonical)
    whole = reference.dequantize(spec, canonical, torch.float16)
    for (n0, n1), (k0, k1) in (((160, 640), (0, 2048)), ((0, 640), (1024, 2048)), ((32, 608), (512, 1792))):
        part = FourBitSpec("nf4", n1 - n0, k1 - k0, blocksize=blocksize)
        tensors = (
            packed["qweight"][n0 // 16 : n1 // 16, k0 // 64 : k1 // 64].contiguous(),
            packed["absmax_q"][n0 // 16 : n1 // 16, k0 // 256 : k1 // 256].contiguous(),
            *(packed[name] for name in ("nested_code", "nested_absmax", "nested_offset")),
        )
        shard = native.describe_weight(part, *tensors)
        shard.n0, shard.kb0, shard.kb_full = n0, k0 // 64, spec.k // 64
        for shape in range(len(SHAPES)):
            x = torch.eye(part.k, device="cuda", dtype=torch.float16)
            y = torch.full((part.k, part.n), torch.nan, device="cuda", dtype=torch.float16)
            assert library.linear(shard, x, None, y, tuned(shape))
            assert torch.equal(y.T, whole[n0:n1, k0:k1])


# ---- memory ----------------------------------------------------------------------------------------------------------


@EVERY_SHAPE
def test_only_the_output_is_written(weight, library, shape):
    spec, _, packed = weight
    for tokens in (SHAPES[shape] - 3, 2 * SHAPES[shape] + 5):
        x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.bfloat16)
        want = launch(library, spec, packed, x, tuned(shape))
        assert want.isfinite().all()
        for shift in (0, 1, 8):
            buffer = torch.full((tokens * spec.n + 128,), 12345.0, device="cuda", dtype=torch.bfloat16)
            sentinel = buffer[0].item()
            y = buffer[64 + shift : 64 + shift + tokens * spec.n].view(tokens, spec.n)
            y.fill_(torch.nan)
            assert library.linear(native.describe_weight(spec, *operands(spec, packed)), x, None, y, tuned(shape))
            assert torch.equal(y, want)
            outside = torch.cat((buffer[: 64 + shift], buffer[64 + shift + y.numel() :]))
            assert (outside == sentinel).all()


@EVERY_SHAPE
def test_what_shared_memory_held_does_not_matter(library, shape):
    """A launch full of NaN, then ragged ones: nothing of the first may be multiplied by zero."""
    bad = FourBitSpec("nf4", 132 * 256, 1024, double_quant=False)
    poison = random_weight(bad)
    poison["absmax"].fill_(torch.nan)
    nans = torch.full((SHAPES[shape], bad.k), torch.nan, device="cuda", dtype=torch.float16)
    for double_quant in (False, True):
        spec = FourBitSpec("nf4", 1000, 832, double_quant=double_quant)
        packed = reorder.pack(spec, fresh_weight(spec, device="cuda"))
        x = torch.randn(SHAPES[shape] - 1, spec.k, device="cuda", dtype=torch.float16)
        want = launch(library, spec, packed, x, tuned(shape))
        launch(library, bad, poison, nans, tuned(shape))
        got = launch(library, spec, packed, x, tuned(shape))
        assert got.isfinite().all() and torch.equal(got, want)


@EVERY_SHAPE
def test_rows_of_activations_apart(weight, library, shape):
    spec, _, packed = weight
    tokens = SHAPES[shape] + 9
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.float16)
    wide = torch.full((tokens, spec.k + 64), torch.nan, device="cuda", dtype=torch.float16)
    wide[:, : spec.k] = x
    apart = launch(library, spec, packed, wide[:, : spec.k], tuned(shape))
    assert torch.equal(apart, launch(library, spec, packed, x, tuned(shape)))


# ---- order of work ---------------------------------------------------------------------------------------------------

# (spec, tokens, flags): output tiles cut by many blocks, by few, and by none.
ORDERED = (
    (FourBitSpec("nf4", 256, 8192), 90, tuned(SHAPES.index(96))),
    (FourBitSpec("nf4", 4096, 2048), 40, tuned(SHAPES.index(64))),
    (FourBitSpec("nf4", 8192, 1024), 600, tuned(SHAPES.index(128))),
    (FourBitSpec("nf4", 2048, 1024), 300, tuned(SHAPES.index(64), WHOLE)),
)


@pytest.fixture(scope="module", params=ORDERED, ids=lambda p: f"{p[0].n}-m{p[1]}-{p[2]:x}")
def ordered(request):
    spec, tokens, flags = request.param
    return spec, random_weight(spec), tokens, flags

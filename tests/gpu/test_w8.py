"""The fused kernels for 8-bit weights: every code exact, as accurate as dequantize + GEMM, and safe inside streams and
graphs; for few tokens (csrc/small_w8.cuh) and on Hopper for any number (csrc/small_wgmma_w8.cuh, csrc/gemm_w8.cuh).

What they compute, with T the 16-bit type of x and all sums in float32; codes are exact in T:

    one scale a row     y = round_T(scale * sum(code * x) + bias)
    group scales        y = round_T(sum over groups of scale * (sum over the group of code * x) + bias)
"""

import pytest
import torch
from fused import DEPENDENT, DTYPES, ROUNDING, any_weight, on_hopper, relative_error, written_alone
from order_of_work import (  # noqa: F401
    test_graphs_replay_on_new_inputs,
    test_two_graphs_at_once,
    test_two_streams_at_once,
    test_waits_for_the_kernel_that_writes_the_activations,
)

from nf4linear import mixed, native, ops, reference, reorder
from nf4linear.bench.linear_w8 import TUNE_GEMM_SHAPES, TUNE_SHAPES, TUNE_WGMMA_SHAPES
from nf4linear.formats import EightBitSpec
from operands import fresh_weight, geometry, operands, packed_weight, spec_id

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SPECS = (
    EightBitSpec("w8_s8", 48, 192),  # fewer tiles than a burst
    EightBitSpec("w8_u8", 1000, 576),  # ragged rows, a burst of one tile
    EightBitSpec("w8_s8", 33, 1088),
    EightBitSpec("w8_s8", 5, 64),
    EightBitSpec("w8_s8", 300, 1024, group_size=64),
    EightBitSpec("w8_s8", 130, 640, group_size=128),
)
WHOLE, CUT = 1, 2  # output tiles of the prefill engine
TRANSPOSED = native.TRANSPOSED_OUTPUT
# (shape, cut, most tokens) of the two engines that are Hopper's alone, counted behind the first one's shapes. To the
# wgmma engine a cut is the fewest units of a block.
HOPPER = [
    *((len(TUNE_SHAPES) + i, units, s[0]) for i, s in enumerate(TUNE_WGMMA_SHAPES) for units in (1, 3)),
    *(
        (len(TUNE_SHAPES) + len(TUNE_WGMMA_SHAPES) + i, cut, None)
        for i in range(len(TUNE_GEMM_SHAPES))
        for cut in (WHOLE, CUT)
    ),
]


def has_room() -> bool:
    """Whether a block's shared memory holds a ring for 32 tokens of any weight; GPUs of 8.0 have it for small ones."""
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= 200 * 1024


@pytest.fixture(scope="module")
def hopper(library):
    if not on_hopper(library):
        pytest.skip("no Hopper GPU")


@pytest.fixture(scope="module", params=SPECS, ids=spec_id)
def weight(request):
    return any_weight(request.param)


def launch(library, spec, packed, x, flags=0, bias=None):
    """The fused product [m, n] into poisoned memory; None where the library leaves the call to a GEMM."""
    transposed = flags & TRANSPOSED
    y = torch.full(
        (spec.n, x.shape[0]) if transposed else (x.shape[0], spec.n), torch.nan, device="cuda", dtype=x.dtype
    )
    done = library.linear(native.describe_weight(spec, *operands(spec, packed)), x, bias, y, flags)
    return (y.T if transposed else y) if done else None


def hopper_flags(library, spec, tokens) -> list[int]:
    """Flags of every Hopper shape and cut that takes such a call on this GPU, those of the prefill engine last."""
    if not on_hopper(library):
        return []
    return [
        native.tuned(shape, cut)
        for shape, cut, most in HOPPER
        if (tokens <= most if most else not spec.group_size)  # only the engine for few tokens has group scales
    ]


def fused_flags(library, spec, tokens) -> int:
    """What launch_fused asks for: up to 32 tokens the launch table's choice, from 33 on, where the table leaves small
    weights to a GEMM, the first Hopper shape that takes so many, if any. Its cut is 1: one unit a block at least, or
    all output tiles whole."""
    return next(iter(hopper_flags(library, spec, tokens)), 0) if tokens > 32 else 0


def check_launched(got, library, spec, tokens):
    """That a kernel ran where this GPU has one for so many tokens, and only there."""
    if tokens <= 16 or tokens > 32 or has_room():
        assert (got is not None) == (tokens <= 32 or bool(hopper_flags(library, spec, tokens)))


def launch_fused(library, spec, packed, x, flags=0, bias=None):
    """The same by a kernel, however small the weight: from 33 tokens on the launch table is not asked (fused_flags).
    None where this GPU has no kernel for so many tokens."""
    tokens = x.shape[0]
    got = launch(library, spec, packed, x, flags | fused_flags(library, spec, tokens), bias)
    check_launched(got, library, spec, tokens)
    return got


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["w8_s8", "w8_u8"])
@pytest.mark.parametrize("tokens", [1, 8, 32, 64, 256])
def test_every_code_is_exact(library, dtype, name, tokens):
    """All 256 codes in every place of a lane, by one-hot activations and a scale of 1."""
    spec = EightBitSpec(name, 272, 320)
    codes = (torch.arange(spec.n * spec.k, device="cuda") * 7 % 256).to(torch.uint8).view(spec.n, spec.k)
    canonical = {"codes": codes.view(spec.integer.dtype), "scale": torch.full((spec.n,), 127.0, device="cuda")}
    packed = reorder.pack(spec, canonical)
    for first in range(0, spec.k - tokens + 1, tokens if tokens > 1 else 9):
        x = torch.zeros(tokens, spec.k, device="cuda", dtype=dtype)
        x[torch.arange(tokens), first + torch.arange(tokens)] = 1
        got = launch_fused(library, spec, packed, x)
        if got is None:
            return
        assert torch.equal(got.T, canonical["codes"][:, first : first + tokens].to(dtype)), first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 300])
def test_error_is_that_of_dequantize_and_gemm(weight, library, dtype, tokens):
    spec, canonical, packed = weight
    x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
    bias = torch.randn(spec.n, device="cuda").to(dtype)
    exact = x.double() @ reference.dequantize(spec, canonical, torch.float32).double().T + bias.double()
    gemm = torch.nn.functional.linear(x, reference.dequantize(spec, canonical, dtype), bias)
    most = 1.05 * relative_error(gemm, exact) + 1e-4
    got = ops.linear(x, *operands(spec, packed), bias, *geometry(spec))
    assert relative_error(got, exact) <= most
    assert torch.equal(got, ops.linear(x, *operands(spec, packed), bias, *geometry(spec))), "two calls differ"
    fused = launch_fused(library, spec, packed, x, bias=bias)  # the operator leaves these weights to a GEMM from 33 on
    if fused is not None:
        assert relative_error(fused, exact) <= most
        assert torch.equal(fused, launch_fused(library, spec, packed, x, bias=bias)), "two kernel calls differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slices", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", range(len(TUNE_SHAPES)), ids=lambda i: "x".join(map(str, TUNE_SHAPES[i])))
def test_every_small_shape_and_cut(weight, library, dtype, shape, slices):
    spec, canonical, packed = weight
    exact_weight = reference.dequantize(spec, canonical, torch.float32).double()
    most = TUNE_SHAPES[shape][1]
    if most > 16 and not has_room():
        pytest.skip("too little shared memory")
    for tokens in {1, most // 2 + 1, most}:
        x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
        got = launch(library, spec, packed, x, native.tuned(shape, slices))
        assert got is not None
        assert relative_error(got, x.double() @ exact_weight.T) < ROUNDING[dtype]
        for flags in (0, DEPENDENT, TRANSPOSED):
            assert torch.equal(got, launch(library, spec, packed, x, native.tuned(shape, slices) | flags))
    x = torch.randn(most + 1, spec.k, device="cuda").to(dtype)
    assert launch(library, spec, packed, x, native.tuned(shape, slices)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "cut", "most"), HOPPER)
def test_every_hopper_shape_and_cut(hopper, weight, library, dtype, shape, cut, most):
    spec, canonical, packed = weight
    flags = native.tuned(shape, cut)
    exact_weight = reference.dequantize(spec, canonical, torch.float32).double()
    bias = torch.randn(spec.n, device="cuda").to(dtype)
    for tokens in (1, most // 2 + 1, most - 1, most) if most else (1, 127, 256, 440):
        x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
        got = launch(library, spec, packed, x, flags, bias)
        assert (got is None) == (bool(spec.group_size) and not most)  # only the engine for few tokens has group scales
        if got is None:
            continue
        assert relative_error(got, x.double() @ exact_weight.T + bias.double()) < ROUNDING[dtype]
        for extra in (0, DEPENDENT, TRANSPOSED):
            assert torch.equal(got, launch(library, spec, packed, x, flags | extra, bias))
    if most:
        assert launch(library, spec, packed, torch.zeros(most + 1, spec.k, device="cuda", dtype=dtype), flags) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_shapes(library, dtype):
    """Several row groups a warp, groups across warps, output tiles across blocks; the launch table alone decides."""
    spec = EightBitSpec("w8_s8", 14336 + 24, 4096 + 64)
    canonical = fresh_weight(spec, device="cuda")
    packed = reorder.pack(spec, canonical)
    exact_weight = reference.dequantize(spec, canonical, torch.float32).double()
    x = torch.randn(1200, spec.k, device="cuda").to(dtype)
    exact = x.double() @ exact_weight.T
    for tokens in (1, 2, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 200, 256, 700, 1200):
        got = launch(library, spec, packed, x[:tokens])
        check_launched(got, library, spec, tokens)
        if got is not None:
            assert relative_error(got, exact[:tokens]) < ROUNDING[dtype], tokens


@pytest.mark.parametrize("variant", mixed.VARIANTS)
def test_mixed_products(library, variant):
    shapes = [(5, 7, 64), (100, 300, 320), (520, 1000, 1088), (33, 20, 96)]
    narrow_first = variant.split("_")[0] in mixed.NARROW
    for tokens, rows, k in ((64, 1024, 2048), (128, 4096, 4096)):  # large enough for Hopper's kernels
        shapes.append((rows, tokens, k) if narrow_first else (tokens, rows, k))
    for m, n, k in shapes:
        generator = torch.Generator("cuda").manual_seed(m)
        dense, given = [], []
        for kind, shape, reorder_operand in zip(
            variant.split("_"), ((m, k), (k, n)), (mixed.reorder_a, mixed.reorder_b), strict=True
        ):
            if kind in mixed.WIDE:
                dense.append(torch.randn(shape, device="cuda", generator=generator).to(mixed.WIDE[kind]))
                given.append(dense[-1])
            else:
                codes = torch.randint(0, 256, shape, device="cuda", generator=generator, dtype=torch.uint8)
                dense.append(codes.view(torch.int8) if kind == "s8" else codes)
                given.append(reorder_operand(dense[-1]))
        got = getattr(mixed, variant)(*given)
        exact = dense[0].double() @ dense[1].double()
        assert got.shape == (m, n) and got.is_contiguous()
        assert relative_error(got, exact) < ROUNDING[got.dtype]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [0, TRANSPOSED])
@pytest.mark.parametrize("tokens", [1, 5, 16, 40, 200])
def test_only_the_output_is_written(weight, library, tokens, transposed):
    spec, _, packed = weight
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.bfloat16)
    want = launch_fused(library, spec, packed, x, transposed)
    if want is None:
        return
    flags = transposed | fused_flags(library, spec, tokens)
    described = native.describe_weight(spec, *operands(spec, packed))
    for shift in (0, 1, 7):
        shape = (spec.n, tokens) if transposed else (tokens, spec.n)
        y = written_alone(lambda y: library.linear(described, x, None, y, flags), shape, shift)
        assert torch.equal(y.T if transposed else y, want)


@pytest.mark.parametrize("transposed", [0, TRANSPOSED])
@pytest.mark.parametrize(("shape", "cut", "most"), HOPPER)
def test_what_shared_memory_held_does_not_matter(hopper, library, shape, cut, most, transposed):
    """A launch full of NaN, then ragged ones: nothing of the first may be multiplied by zero."""
    flags = native.tuned(shape, cut) | transposed
    width = most or TUNE_GEMM_SHAPES[shape - len(TUNE_SHAPES) - len(TUNE_WGMMA_SHAPES)][0]
    bad = EightBitSpec("w8_s8", 132 * 256, 1024)
    poison = packed_weight(bad, device="cuda")
    poison["scale"].fill_(torch.nan)
    nans = torch.full((width, bad.k), torch.nan, device="cuda", dtype=torch.float16)
    for spec in (EightBitSpec("w8_s8", 1000, 832), EightBitSpec("w8_u8", 1000, 1088)):
        packed = packed_weight(spec, device="cuda")
        for tokens in (width - 1, width // 2 - 3, 1) if most else (width + 9, width - 1, width // 2 - 3, 1):
            x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.float16)
            want = launch(library, spec, packed, x, flags)
            launch(library, bad, poison, nans, flags)
            got = launch(library, spec, packed, x, flags)
            assert got.isfinite().all() and torch.equal(got, want), (spec.format, tokens)


@pytest.mark.parametrize("tokens", [1, 5, 16, 40, 300])
def test_activations_anywhere(weight, library, tokens):
    """Views that start at any element, rows apart from each other: the operator copies what the kernel cannot read.

    From 33 tokens on it leaves these weights to the framework's GEMM, which sums in another order for other strides.
    """
    spec, _, packed = weight
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.float16)
    want = ops.linear(x, *operands(spec, packed), None, *geometry(spec))
    for shift, width in ((1, spec.k + 8), (8, spec.k + 8), (0, spec.k + 3), (5, spec.k + 16)):
        view = torch.empty(tokens, width, device="cuda", dtype=torch.float16)[:, shift % 8 : shift % 8 + spec.k]
        view.copy_(x)
        assert relative_error(ops.linear(view, *operands(spec, packed), None, *geometry(spec)), want.double()) < 1e-3
    wide = torch.full((tokens, spec.k + 64), torch.nan, device="cuda", dtype=torch.float16)
    wide[:, : spec.k] = x
    for flags in hopper_flags(library, spec, tokens):
        apart = launch(library, spec, packed, wide[:, : spec.k], flags)
        assert apart is not None and torch.equal(apart, launch(library, spec, packed, x, flags)), hex(flags)


# ---- order of work ---------------------------------------------------------------------------------------------------

# (spec, tokens, flags): with and without sums between blocks; of the Hopper engines, sums that all sharers add up, sums
# that the first of them adds up, and whole output tiles beside cut ones.
ORDERED = (
    (EightBitSpec("w8_s8", 4096, 1024), 1, 0),
    (EightBitSpec("w8_s8", 512, 1024), 4, native.tuned(1, 4)),
    (EightBitSpec("w8_s8", 1024, 2048), 16, native.tuned(2, 8)),
    (EightBitSpec("w8_s8", 1024, 2048), 48, 0),
    (EightBitSpec("w8_s8", 1024, 2048, group_size=128), 48, 0),
    (EightBitSpec("w8_s8", 1000, 4096 + 64), 64, native.tuned(len(TUNE_SHAPES) + 3, 1)),
    (EightBitSpec("w8_s8", 6144, 1024), 256, native.tuned(len(TUNE_SHAPES) + len(TUNE_WGMMA_SHAPES), CUT)),
)


@pytest.fixture(scope="module", params=ORDERED, ids=lambda p: f"{p[0].n}-m{p[1]}-{p[2]:x}")
def ordered(request, library):
    spec, tokens, flags = request.param
    packed = reorder.pack(spec, fresh_weight(spec, device="cuda"))
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.bfloat16)
    if launch(library, spec, packed, x, flags) is None:
        assert not on_hopper(library), "some kernel takes every one of them there"
        pytest.skip("left to a GEMM on this GPU")
    return spec, packed, tokens, flags

"""Tests of the prefill engines: a file imports those that it wants, or all.

They run over all compiled shapes of the file's ENGINE, by fixtures that it imports with them: `engine`; `shape`, the
index of one of its shapes (pytest_generate_tests); and `weight`, which gives (spec, canonical, packed).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from fused import (
    DEPENDENT,
    DTYPES,
    PLAIN,
    PREFILL_SPECS,
    ROUNDING,
    any_weight,
    launch,
    random_weight,
    relative_error,
    written_alone,
)

from nf4linear import native, ops, reference, reorder
from nf4linear.formats import FourBitSpec
from operands import cut_shard, fresh_weight, geometry, operands, spec_id


@dataclass(frozen=True)
class PrefillEngine:
    """Compiled shapes of an engine, as the tuning flags reach them."""

    widths: tuple[int, ...]  # tokens of each shape
    first_shape: int  # number of the first one
    cuts: Callable[[int, FourBitSpec, int], Sequence[int]]  # of a shape, a weight and tokens: all ways to cut the call
    few: int  # the least tokens of interest
    many: int
    beyond: tuple[int, ...]  # shapes to try with outputs beyond 2**31

    def tuned(self, shape: int, cut: int = 0) -> int:
        """Flags that take a compiled shape in place of the launch table's choice."""
        return native.tuned(self.first_shape + shape, cut)


@pytest.fixture(scope="module")
def engine(request):
    return request.module.ENGINE


def pytest_generate_tests(metafunc):
    if "shape" in metafunc.fixturenames:
        metafunc.parametrize("shape", range(len(metafunc.module.ENGINE.widths)))


@pytest.fixture(scope="module", params=PREFILL_SPECS, ids=spec_id)
def weight(request):
    return any_weight(request.param)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identity_activations_give_the_dequantized_weight(weight, library, dtype, engine, shape):
    spec, canonical, packed = weight
    want = reference.dequantize(spec, canonical, dtype)
    x = torch.eye(spec.k, device="cuda", dtype=dtype)
    for cut in engine.cuts(shape, spec, spec.k):
        assert torch.equal(launch(library, spec, packed, x, engine.tuned(shape, cut)).T, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_that_of_dequantize_and_gemm(weight, library, dtype, engine, shape):
    spec, canonical, packed = weight
    exact_weight = reference.dequantize(spec, canonical, dtype)
    width = engine.widths[shape]
    for tokens in (1, engine.few, width - 1, width, width + 1, engine.many):
        x = torch.randn(tokens, spec.k, device="cuda").to(dtype)
        bias = torch.randn(spec.n, device="cuda").to(dtype)
        exact = x.double() @ exact_weight.double().T + bias.double()
        gemm = torch.nn.functional.linear(x, exact_weight, bias)
        most = 1.02 * relative_error(gemm, exact) + 1e-5
        for cut in engine.cuts(shape, spec, tokens):
            flags = engine.tuned(shape, cut)
            got = launch(library, spec, packed, x, flags, bias)
            assert relative_error(got, exact) <= most, (tokens, cut)
            for launched in (PLAIN, DEPENDENT):
                assert torch.equal(got, launch(library, spec, packed, x, flags | launched, bias)), (tokens, cut)


def test_large_shapes(library, engine, shape):
    """Full waves and cut ones, blocks that share output tiles in all ways, rings that go round."""
    for n, k in ((14336 + 24, 4096 + 64), (2064, 14336), (4096, 4096)):
        spec = FourBitSpec("nf4", n, k)
        packed = random_weight(spec)
        dense = ops.dequantize(*operands(spec, packed), *geometry(spec), torch.bfloat16)
        x = torch.randn(1100, spec.k, device="cuda", dtype=torch.bfloat16)
        exact = x.float() @ dense.float().T
        for tokens in (engine.few, 128, 200, 256, 511, 1100):
            for cut in engine.cuts(shape, spec, tokens):
                got = launch(library, spec, packed, x[:tokens], engine.tuned(shape, cut))
                assert relative_error(got, exact[:tokens].double()) < 2e-3, (n, k, tokens, cut)


def test_many_tokens_and_outputs_beyond_two_to_the_31(library, engine):
    for tokens, n, k in ((100_003, 1024, 512), (16_500, 131_088, 128)):
        spec = FourBitSpec("nf4", n, k)
        packed = random_weight(spec)
        dense = ops.dequantize(*operands(spec, packed), *geometry(spec), torch.float16)
        x = torch.randn(tokens, k, device="cuda", dtype=torch.float16)
        want = x @ dense.T
        for shape in engine.beyond:
            got = launch(library, spec, packed, x, engine.tuned(shape))
            for rows in (slice(0, 300), slice(tokens // 2, tokens // 2 + 300), slice(tokens - 300, tokens)):
                assert relative_error(got[rows], want[rows].double()) < 1e-3, (tokens, shape)
            assert torch.allclose(got, want, rtol=0.05, atol=0.5), (tokens, shape)


def test_more_weights_than_two_to_the_33(library, engine):
    spec = FourBitSpec("nf4", 131088, 65536)
    packed = random_weight(spec)
    x = torch.randn(100, spec.k, device="cuda").half() / 64
    dense = ops.dequantize(*operands(spec, packed), *geometry(spec), torch.float16)
    exact = x.double() @ dense[-16:].double().T
    del dense
    for shape in range(len(engine.widths)):
        got = launch(library, spec, packed, x, engine.tuned(shape, engine.cuts(shape, spec, 100)[0]))
        assert relative_error(got[:, -16:], exact) < ROUNDING[torch.float16]


@pytest.mark.parametrize("blocksize", [64, 256])
def test_shards_find_their_second_level_scales(library, engine, blocksize):
    """Rows and inputs cut out of a weight: the shard knows where it lies, its tables are those of the whole."""
    spec = FourBitSpec("nf4", 640, 2048, blocksize=blocksize)
    canonical = fresh_weight(spec, device="cuda")
    packed = reorder.pack(spec, canonical)
    whole = reference.dequantize(spec, canonical, torch.float16)
    for (n0, n1), (k0, k1) in (((160, 640), (0, 2048)), ((0, 640), (1024, 2048)), ((32, 608), (512, 1792))):
        shard = cut_shard(spec, packed, (n0, n1), (k0, k1))
        x = torch.eye(shard.spec.k, device="cuda", dtype=torch.float16)
        for shape in range(len(engine.widths)):
            for cut in engine.cuts(shape, shard.spec, shard.spec.k):
                y = torch.full((shard.spec.k, shard.spec.n), torch.nan, device="cuda", dtype=torch.float16)
                assert library.linear(shard.weight, x, None, y, engine.tuned(shape, cut))
                assert torch.equal(y.T, whole[n0:n1, k0:k1]), (shape, cut)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_only_the_output_is_written(weight, library, engine, shape):
    spec, _, packed = weight
    described = native.describe_weight(spec, *operands(spec, packed))
    for tokens in (engine.widths[shape] - 3, 2 * engine.widths[shape] + 5):
        x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.bfloat16)
        for cut in engine.cuts(shape, spec, tokens):
            flags = engine.tuned(shape, cut)
            want = launch(library, spec, packed, x, flags)
            assert want.isfinite().all()
            for shift in (0, 1, 8):
                write = functools.partial(library.linear, described, x, None, flags=flags)
                assert torch.equal(written_alone(write, (tokens, spec.n), shift), want), (tokens, cut, shift)


def test_what_shared_memory_held_does_not_matter(library, engine, shape):
    """A launch full of NaN, then ragged ones: nothing of the first may be multiplied by zero."""
    bad = FourBitSpec("nf4", 132 * 256, 1024, double_quant=False)
    poison = random_weight(bad)
    poison["absmax"].fill_(torch.nan)
    width = engine.widths[shape]
    nans = torch.full((width, bad.k), torch.nan, device="cuda", dtype=torch.float16)
    for double_quant in (False, True):
        spec = FourBitSpec("nf4", 1000, 1088, double_quant=double_quant)
        packed = reorder.pack(spec, fresh_weight(spec, device="cuda"))
        for tokens in (width - 1, width // 2 - 3, 1):  # of which all, half or hardly any rows of x are copied
            x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.float16)
            for cut in engine.cuts(shape, spec, tokens):
                want = launch(library, spec, packed, x, engine.tuned(shape, cut))
                launch(library, bad, poison, nans, engine.tuned(shape))
                got = launch(library, spec, packed, x, engine.tuned(shape, cut))
                assert got.isfinite().all() and torch.equal(got, want), (tokens, cut)


def test_rows_of_activations_apart(weight, library, engine, shape):
    spec, _, packed = weight
    tokens = engine.widths[shape] + 9
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.float16)
    wide = torch.full((tokens, spec.k + 64), torch.nan, device="cuda", dtype=torch.float16)
    wide[:, : spec.k] = x
    for cut in engine.cuts(shape, spec, tokens):
        apart = launch(library, spec, packed, wide[:, : spec.k], engine.tuned(shape, cut))
        assert torch.equal(apart, launch(library, spec, packed, x, engine.tuned(shape, cut))), cut

"""Hopper's prefill engine: weights bit for bit those of dequantize, sums as accurate as a GEMM's, and nothing but y
written.

Blocks of a cluster may share an output tile and send partial sums to each other: every shape is tried with and without.
"""

import pytest
import torch
from fused import DEPENDENT, DTYPES, PLAIN, launch, random_weight, relative_error, written_alone
from order_of_work import (  # noqa: F401
    test_graphs_replay_on_new_inputs,
    test_two_graphs_at_once,
    test_two_streams_at_once,
    test_waits_for_the_kernel_that_writes_the_activations,
)
from prefill import (  # noqa: F401
    PrefillEngine,
    engine,
    pytest_generate_tests,
    test_error_is_that_of_dequantize_and_gemm,
    test_identity_activations_give_the_dequantized_weight,
    test_large_shapes,
    test_many_tokens_and_outputs_beyond_two_to_the_31,
    test_more_weights_than_two_to_the_33,
    test_only_the_output_is_written,
    test_rows_of_activations_apart,
    test_shards_find_their_second_level_scales,
    test_what_shared_memory_held_does_not_matter,
    weight,
)

from gemm_slices import FOUR_BY_TWO, TWO_LAUNCHES, can_be_cut
from nf4linear import native, ops
from nf4linear.bench.linear import TUNE_GEMM_SHAPES, TUNE_GEMM_SLICES, TUNE_SHAPES, TUNE_WGMMA_SHAPES
from nf4linear.formats import FourBitSpec
from operands import geometry, operands, spec_id

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]


def slices_of(shape: int, spec: FourBitSpec, tokens: int) -> list[int]:
    """All numbers of slices that a call may have (plan_gemm of csrc/gemm_wgmma_plan.h)."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    width, consumers = TUNE_GEMM_SHAPES[shape]
    pairs = -(-tokens // width) * -(-spec.n // (128 * consumers))
    k_tiles = spec.k // 64
    return [slices for slices in TUNE_GEMM_SLICES.values() if can_be_cut(width, consumers, pairs, k_tiles, slices, sms)]


# Tokens of GEMM_SHAPES in csrc/gemm_wgmma_shape.h, which come after the shapes of the other engines.
SHAPES = tuple(tokens for tokens, _ in TUNE_GEMM_SHAPES)
ENGINE = PrefillEngine(
    SHAPES, len(TUNE_SHAPES) + len(TUNE_WGMMA_SHAPES), slices_of, 65, 777, tuple(map(SHAPES.index, (192, 256, 344)))
)


@pytest.fixture(scope="module")
def library(library):
    assert "90a" in library.architectures.split(",")
    return library


two_launches = pytest.mark.parametrize(
    ("spec", "tokens"), [case[:2] for case in TWO_LAUNCHES], ids=[spec_id(spec) for spec, *_ in TWO_LAUNCHES]
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@two_launches
def test_two_launches(library, dtype, spec, tokens):
    packed = random_weight(spec)
    dense = ops.dequantize(*operands(spec, packed), *geometry(spec), dtype)
    ones = torch.arange(tokens, device="cuda") * 7 % spec.k
    x = torch.zeros(tokens, spec.k, device="cuda", dtype=dtype).scatter_(1, ones[:, None], 1)
    assert torch.equal(launch(library, spec, packed, x).T, dense[:, ones]), "weights bit for bit"
    x, bias = (torch.randn(shape, device="cuda").to(dtype) for shape in ((tokens, spec.k), (spec.n,)))
    exact = x.double() @ dense.double().T + bias.double()
    most = 1.02 * relative_error(torch.nn.functional.linear(x, dense, bias), exact) + 1e-5
    want = launch(library, spec, packed, x, PLAIN, bias)
    assert relative_error(want, exact) <= most
    assert torch.equal(launch(library, spec, packed, x, DEPENDENT, bias), want)


@two_launches
def test_two_launches_write_only_the_output(library, spec, tokens):
    packed = random_weight(spec)
    described = native.describe_weight(spec, *operands(spec, packed))
    x = torch.randn(tokens, spec.k, device="cuda", dtype=torch.bfloat16)
    want = launch(library, spec, packed, x)
    assert want.isfinite().all()
    for shift in (0, 1, 8):
        y = written_alone(lambda y: library.linear(described, x, None, y, PLAIN), (tokens, spec.n), shift)
        assert torch.equal(y, want), shift


# (spec, tokens, flags): output tiles of four blocks, of two, of one, and of one and then of two; of four blocks of two
# clusters, which count in memory; and two launches, with and without such.
ORDERED = (
    (FourBitSpec("nf4", 256, 8192), 100, ENGINE.tuned(SHAPES.index(128), 4)),
    (FourBitSpec("nf4", 4096, 2048), 250, ENGINE.tuned(SHAPES.index(256), 2)),
    (FourBitSpec("nf4", 8192, 1024), 600, ENGINE.tuned(SHAPES.index(192), 1)),
    (FourBitSpec("nf4", 2048, 1024), 300, ENGINE.tuned(SHAPES.index(256), 1)),
    (FourBitSpec("nf4", 8192, 1024), 600, ENGINE.tuned(SHAPES.index(256), 2)),
    (FourBitSpec("nf4", 8192, 1024), 700, ENGINE.tuned(SHAPES.index(344), 2)),
    (FourBitSpec("nf4", 4096, 2048), 250, ENGINE.tuned(SHAPES.index(256), FOUR_BY_TWO)),
    (FourBitSpec("nf4", 2048, 4096), 250, ENGINE.tuned(SHAPES.index(128), FOUR_BY_TWO)),
    *((spec, tokens, PLAIN) for spec, tokens, slices in TWO_LAUNCHES if slices in (1, FOUR_BY_TWO)),
)


@pytest.fixture(scope="module", params=ORDERED, ids=lambda p: f"{p[0].n}-m{p[1]}-{p[2]:x}")
def ordered(request):
    spec, tokens, flags = request.param
    return spec, random_weight(spec), tokens, flags

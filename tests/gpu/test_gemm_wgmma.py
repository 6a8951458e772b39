"""Hopper's prefill engine: weights bit for bit those of dequantize, sums as accurate as a GEMM's, and nothing but y
written.

Blocks of a cluster may share an output tile and send partial sums to each other: every shape is tried with and without.
"""

import pytest
import torch
from fused import random_weight
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

from gemm_slices import FOUR_BY_TWO, can_be_cut
from nf4linear.bench.linear import TUNE_GEMM_SHAPES, TUNE_GEMM_SLICES, TUNE_SHAPES, TUNE_WGMMA_SHAPES
from nf4linear.formats import FourBitSpec

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


# (spec, tokens, flags): output tiles of four blocks, of two, of one, and of one and then of two; and of four blocks of
# two clusters, which count in memory.
ORDERED = (
    (FourBitSpec("nf4", 256, 8192), 100, ENGINE.tuned(SHAPES.index(128), 4)),
    (FourBitSpec("nf4", 4096, 2048), 250, ENGINE.tuned(SHAPES.index(256), 2)),
    (FourBitSpec("nf4", 8192, 1024), 600, ENGINE.tuned(SHAPES.index(192), 1)),
    (FourBitSpec("nf4", 2048, 1024), 300, ENGINE.tuned(SHAPES.index(256), 1)),
    (FourBitSpec("nf4", 8192, 1024), 600, ENGINE.tuned(SHAPES.index(256), 2)),
    (FourBitSpec("nf4", 8192, 1024), 700, ENGINE.tuned(SHAPES.index(344), 2)),
    (FourBitSpec("nf4", 4096, 2048), 250, ENGINE.tuned(SHAPES.index(256), FOUR_BY_TWO)),
    (FourBitSpec("nf4", 2048, 4096), 250, ENGINE.tuned(SHAPES.index(128), FOUR_BY_TWO)),
)


@pytest.fixture(scope="module", params=ORDERED, ids=lambda p: f"{p[0].n}-m{p[1]}-{p[2]:x}")
def ordered(request):
    spec, tokens, flags = request.param
    return spec, random_weight(spec), tokens, flags

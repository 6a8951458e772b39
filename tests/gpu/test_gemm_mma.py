"""The mma.sync prefill engine: weights bit for bit those of dequantize, sums as accurate as a GEMM's, and nothing but y
written. Tuning flags reach it on every GPU from sm_80 on.

Its blocks leave partial sums to each other, so the cuts matter: every shape is tried with and without them.
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

from nf4linear.bench.linear import (
    TUNE_CUTS,
    TUNE_GEMM_MMA_SHAPES,
    TUNE_GEMM_SHAPES,
    TUNE_SHAPES,
    TUNE_WGMMA_SHAPES,
)
from nf4linear.formats import FourBitSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="no GPU from sm_80 on"
    ),
]

# Tokens of GEMM_MMA_SHAPES in csrc/gemm_mma_plan.h, which come after the shapes of the other engines.
SHAPES = TUNE_GEMM_MMA_SHAPES
ENGINE = PrefillEngine(
    SHAPES,
    len(TUNE_SHAPES) + len(TUNE_WGMMA_SHAPES) + len(TUNE_GEMM_SHAPES),
    lambda shape, spec, tokens: tuple(TUNE_CUTS.values()),
    33,
    333,
    tuple(range(len(SHAPES))),
)


# (spec, tokens, flags): output tiles cut by many blocks, by few, and by none.
ORDERED = (
    (FourBitSpec("nf4", 256, 8192), 90, ENGINE.tuned(SHAPES.index(96))),
    (FourBitSpec("nf4", 4096, 2048), 40, ENGINE.tuned(SHAPES.index(64))),
    (FourBitSpec("nf4", 8192, 1024), 600, ENGINE.tuned(SHAPES.index(128))),
    (FourBitSpec("nf4", 2048, 1024), 300, ENGINE.tuned(SHAPES.index(64), TUNE_CUTS["whole"])),
)


@pytest.fixture(scope="module", params=ORDERED, ids=lambda p: f"{p[0].n}-m{p[1]}-{p[2]:x}")
def ordered(request):
    spec, tokens, flags = request.param
    return spec, random_weight(spec), tokens, flags

"""The demo model on a GPU: the same claims as tests/test_demo_model.py, through the CUDA library."""

import pytest
from transformers import AutoTokenizer

import nf4linear
from demo_model import LAYERS, load, logits, relative_error
from nf4linear.generation import Sampling, generate
from nf4linear.perplexity import perplexity

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def oracle_logits(demo_folders, demo_tokens):
    return {dtype: logits(load(demo_folders[1], "exact", dtype, "cuda"), demo_tokens) for dtype in DTYPES}


def test_float32_logits_are_the_oracle_s(demo_packed, demo_tokens, oracle_logits):
    model = load(demo_packed, "nf4linear", "float32", "cuda")
    assert sum(isinstance(module, nf4linear.NF4Linear) for module in model.modules()) == LAYERS
    assert relative_error(logits(model, demo_tokens), oracle_logits["float32"]) <= 1e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_logits_are_as_near_to_the_float32_oracle_as_the_16_bit_oracle_is(
    demo_packed, demo_tokens, oracle_logits, dtype
):
    ours = relative_error(logits(load(demo_packed, "nf4linear", dtype, "cuda"), demo_tokens), oracle_logits["float32"])
    theirs = relative_error(oracle_logits[dtype], oracle_logits["float32"])
    print(f"{dtype}: {ours:.5f} here, {theirs:.5f} the oracle")
    assert ours <= 1.3 * theirs


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_perplexity_differs_from_the_oracle_s_by_noise_only(demo_folders, demo_packed, demo_tokens, dtype):
    ours = perplexity(load(demo_packed, "nf4linear", dtype, "cuda"), demo_tokens, window=512, stride=256)
    expected = perplexity(load(demo_folders[1], "exact", dtype, "cuda"), demo_tokens, window=512, stride=256)
    change, error = ours.relative_to(expected)
    print(f"{dtype}: {change:+.5f} ± {error:.5f}")
    assert abs(change) <= 1e-3 + 3 * error


def test_eight_bit_perplexity_is_within_a_hundredth_of_16_bit(demo_folders, demo_tokens):
    ours = perplexity(
        load(demo_folders[0], "nf4linear", "bfloat16", "cuda", format="w8_s8"), demo_tokens, window=512, stride=256
    )
    expected = perplexity(load(demo_folders[0], "16-bit", "bfloat16", "cuda"), demo_tokens, window=512, stride=256)
    assert ours.perplexity == pytest.approx(expected.perplexity, rel=1e-2)


def test_compiled_generation_with_a_static_cache_gives_the_eager_tokens(demo_packed):
    model, tokenizer = load(demo_packed, "nf4linear", "float32", "cuda"), AutoTokenizer.from_pretrained(demo_packed)
    eager, compiled = (
        generate(model, tokenizer, "Name three colours.", max_new_tokens=24, sampling=Sampling(0), static_cache=static)
        for static in (False, True)
    )
    assert compiled.token_ids == eager.token_ids

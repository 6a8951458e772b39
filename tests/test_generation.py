"""generate(): prompts, sampling options, streaming and counts, on a tiny random model with a word tokenizer."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from nf4linear.generation import Sampling, encode_prompt, generate

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=48, bos_token_id=60, eos_token_id=61, pad_token_id=61,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


@pytest.fixture
def tokenizer():
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<bos>", "<eos>", "user:", "answer:"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<bos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", bos_token="<bos>")


def with_template(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}answer:"
    return tokenizer


def test_prompt_goes_through_the_chat_template_where_there_is_one(tokenizer):
    raw = encode_prompt(tokenizer, "w1 w2")
    assert raw.tolist() == [[1, 2]]
    chat = encode_prompt(with_template(tokenizer), "w1 w2")
    assert chat.tolist() == [[62, 1, 2, 63]]
    assert encode_prompt(tokenizer, "w1 w2", chat=False).tolist() == raw.tolist()
    assert encode_prompt(tokenizer, "w1", system="w9").tolist() == [[60, 9, 62, 1, 63]]  # "system:" is unknown: 60


def test_prompts_that_cannot_be(tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tokenizer, "w1", chat=True)
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tokenizer, "w1", system="w2")
    with pytest.raises(ValueError, match="prompt is empty"):
        encode_prompt(tokenizer, "")


def test_greedy_equals_the_argmax_of_a_full_forward(model, tokenizer):
    pieces = []
    result = generate(model, tokenizer, "w5 w6 w7", max_new_tokens=9, sampling=Sampling(0), write=pieces.append)
    ids = torch.tensor([[5, 6, 7]])
    for _ in range(9):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == 61:
            break
    assert result.token_ids == ids[0, 3:].tolist()
    assert "".join(pieces) == result.text
    assert len(pieces) > 1  # streamed, not printed at the end
    assert (result.prompt_tokens, result.new_tokens) == (3, len(result.token_ids))
    assert result.prefill_tokens_per_second > 0 and result.decode_tokens_per_second > 0


def test_one_token_has_a_prefill_and_no_decode_speed(model, tokenizer):
    result = generate(model, tokenizer, "w5", max_new_tokens=1, sampling=Sampling(0))
    assert result.new_tokens == 1 and result.decode_seconds == 0 and result.decode_tokens_per_second is None


def test_seed_repeats_the_draws_and_another_changes_them(model, tokenizer):
    def draw(seed):
        return generate(model, tokenizer, "w5", max_new_tokens=20, sampling=Sampling(5.0, seed=seed)).token_ids

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_top_k_of_one_is_greedy(model, tokenizer):
    greedy = generate(model, tokenizer, "w5", max_new_tokens=12, sampling=Sampling(0))
    top = generate(model, tokenizer, "w5", max_new_tokens=12, sampling=Sampling(2.0, top_k=1, seed=3))
    assert top.token_ids == greedy.token_ids


def test_static_cache_gives_the_same_tokens(model, tokenizer):
    plain = generate(model, tokenizer, "w5 w6", max_new_tokens=12, sampling=Sampling(0))
    static = generate(model, tokenizer, "w5 w6", max_new_tokens=12, sampling=Sampling(0), static_cache=True)
    assert static.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("options", "wrong"), [({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": 0}, "top_k")]
)
def test_sampling_options_out_of_range(options, wrong):
    with pytest.raises(ValueError, match=wrong):
        Sampling(**options)


def test_too_long_a_request_names_the_numbers(model, tokenizer):
    with pytest.raises(ValueError, match=r"2 tokens and 47 new ones.*48 positions"):
        generate(model, tokenizer, "w1 w2", max_new_tokens=47)

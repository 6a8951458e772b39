"""Tiny random models of several architectures: their configs, classes, and a forward pass to compare."""

from __future__ import annotations

import torch


def tiny_config(architecture: str):
    import transformers as tf

    common = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    decoder = common | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if architecture == "llama":
        return tf.LlamaConfig(**decoder)
    if architecture == "llama-tied":
        return tf.LlamaConfig(**decoder, tie_word_embeddings=True)
    if architecture == "llama-odd":  # K = 96: blocks straddle rows, and bitsandbytes fails on a CPU
        return tf.LlamaConfig(**decoder | {"intermediate_size": 96})
    if architecture == "mixtral":
        return tf.MixtralConfig(**decoder, num_local_experts=2, num_experts_per_tok=1)
    if architecture == "gpt2":
        return tf.GPT2Config(**common, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    if architecture == "t5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
        return tf.T5Config(**common, **sizes, decoder_start_token_id=0)
    raise KeyError(architecture)


ARCHITECTURES = ("llama", "llama-tied", "llama-odd", "mixtral", "gpt2", "t5")


def auto_class(architecture: str):
    import transformers

    return transformers.AutoModelForSeq2SeqLM if architecture == "t5" else transformers.AutoModelForCausalLM


def bnb_config(bits: int = 4, **options):
    import transformers

    if bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True, **options)
    return transformers.BitsAndBytesConfig(
        **{
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.bfloat16,
        }
        | options
    )


def logits(model: torch.nn.Module, architecture: str = "llama") -> torch.Tensor:
    ids = torch.arange(3, 21).view(2, 9)
    extra = {"decoder_input_ids": ids} if architecture == "t5" else {}
    with torch.no_grad():
        return model(input_ids=ids, **extra).logits

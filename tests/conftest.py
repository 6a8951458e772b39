"""Tiny random models of several architectures, saved plain, quantized by bitsandbytes, and packed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


def _tiny_config(architecture: str):
    import transformers as tf

    common = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    decoder = common | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if architecture == "llama":
        return tf.LlamaConfig(**decoder)
    if architecture == "llama-tied":
        return tf.LlamaConfig(**decoder, tie_word_embeddings=True)
    if architecture == "mixtral":
        return tf.MixtralConfig(**decoder, num_local_experts=2, num_experts_per_tok=1)
    if architecture == "gpt2":
        return tf.GPT2Config(**common, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    if architecture == "t5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
        return tf.T5Config(**common, **sizes, decoder_start_token_id=0)
    raise KeyError(architecture)


ARCHITECTURES = ("llama", "llama-tied", "mixtral", "gpt2", "t5")


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a saved bfloat16 model of an architecture."""
    folders: dict[str, Path] = {}

    def make(architecture: str = "llama") -> Path:
        if architecture not in folders:
            torch.manual_seed(0)
            folders[architecture] = tmp_path_factory.mktemp(architecture)
            model = auto_class(architecture).from_config(_tiny_config(architecture)).bfloat16()
            model.save_pretrained(folders[architecture])
        return folders[architecture]

    return make


@pytest.fixture(scope="session")
def tiny_bnb(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of the same model quantized and saved by bitsandbytes."""
    folders: dict[tuple, Path] = {}

    def make(architecture: str = "llama", bits: int = 4, **options) -> Path:
        key = (architecture, bits, *sorted(options.items()))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"{architecture}-bnb{bits}")
            config = bnb_config(bits, **options)
            auto_class(architecture).from_pretrained(
                tiny(architecture), quantization_config=config
            ).save_pretrained(folders[key])
        return folders[key]

    return make


@pytest.fixture(scope="session")
def tiny_packed(tiny_bnb: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of the bitsandbytes model, patched and saved in packed form."""
    folders: dict[tuple[str, int], Path] = {}

    def make(architecture: str = "llama", bits: int = 4) -> Path:
        import nf4linear

        if (architecture, bits) not in folders:
            folder = folders[architecture, bits] = tmp_path_factory.mktemp(f"{architecture}-packed{bits}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = auto_class(architecture).from_pretrained(tiny_bnb(architecture, bits))
                nf4linear.patch_model(model, progress=False).save_pretrained(folder)
        return folders[architecture, bits]

    return make


@pytest.fixture(autouse=True)
def remarks_afresh() -> Iterator[None]:
    """Remarks that are made once a process are made once a test."""
    yield
    import sys

    module = sys.modules.get("nf4linear.bnb")
    if module is not None:
        module.warn_once.cache_clear()

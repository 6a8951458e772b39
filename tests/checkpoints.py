"""Tiny checkpoints for the tests, made by bitsandbytes and transformers themselves, and tools to look at them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

# hidden 64: attention in tiles; intermediate 96: down_proj's blocks straddle rows, so it is flat.
TILED = dict(hidden_size=64, intermediate_size=96, num_attention_heads=2, head_dim=32)
# Nothing is a multiple of anything, and gate_proj has an odd number of weights.
ODD = dict(hidden_size=33, intermediate_size=41, num_attention_heads=3, head_dim=8)
Q_PROJ = "model.layers.0.self_attn.q_proj"


def save_plain(folder: Path, sizes: dict = TILED, *, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2,
        num_key_value_heads=1,
        vocab_size=64,
        tie_word_embeddings=tied,
        **sizes,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def save_bnb(folder: Path, sizes: dict = TILED, *, max_shard_size: str = "5GB", tied: bool = False, **options) -> Path:
    """A checkpoint as users have it: quantized while loading, then saved."""
    plain = save_plain(folder.parent / f"{folder.name}-plain", sizes, tied=tied)
    quantization = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
INT8 = dict(load_in_8bit=True)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `change` to the tensors of a single-file checkpoint, in place."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    held = {key: tensor.clone() for key, tensor in load_file(path).items()}
    change(held)
    save_file(held, path, metadata)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, indent=2))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

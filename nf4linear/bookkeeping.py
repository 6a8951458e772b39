"""What transformers notes on a model about its quantization, kept true when layers are replaced.

Works on any module: one that is no transformers model has nothing to keep.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from . import bnb
from .model_rules import describe_quantization
from .plain import is_linear

# Attributes of a transformers model that say how it is quantized; absent ones stay absent.
_ATTRIBUTES = ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")
_BEFORE = "_nf4linear_before"  # holds what a bitsandbytes model had, for unpatch_model


def is_transformers_model(model: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def adopt(model: nn.Module) -> None:
    """Note on `model` that it holds packed layers: quantizer, config, and nothing of bitsandbytes any more."""
    if not is_transformers_model(model):
        return
    from .hf import NF4LinearConfig, NF4LinearQuantizer
    from .hf_model import extend_transformers

    config = NF4LinearConfig(**describe_quantization(model))
    if _BEFORE not in model.__dict__:
        model.__dict__[_BEFORE] = _take(model)
    _clear(model)
    model.hf_quantizer = NF4LinearQuantizer(config, pre_quantized=True)
    model.quantization_method = config.quant_method
    model.is_quantized = True
    model.config.quantization_config = config
    model.config._is_quantized = True
    _drop_quantizer_conversions(model)
    extend_transformers()


def untie(model: nn.Module, name: str) -> bool:
    """Note that the output embedding `name` has a weight of its own from now on; whether it was tied before."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = [(a, b) for a, b in dict(tied).items() if f"{name}.weight" in (a, b)]
    for key, _ in pairs:
        del model.all_tied_weights_keys[key]
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    was_tied = bool(pairs)
    for part in (config, get_text_config() if get_text_config is not None else None):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
            was_tied = True
    return was_tied


def release(model: nn.Module) -> None:
    """Note on `model` that its layers are bitsandbytes' now, with its own settings where it had some."""
    if not is_transformers_model(model):
        return
    before = model.__dict__.pop(_BEFORE, None)
    _clear(model)
    if before is not None and before["quantization_config"] is not None:
        for name, value in before["attributes"].items():
            setattr(model, name, value)
        model.config.quantization_config = before["quantization_config"]
        if before["conversions"] is not None:
            model._weight_conversions = before["conversions"]
    else:
        _adopt_bitsandbytes(model)


def _take(model: nn.Module) -> dict[str, Any]:
    """What a model says of its quantization by bitsandbytes; quantization_config is None if it was not so quantized."""
    config = getattr(model.config, "quantization_config", None)
    return {
        "attributes": {name: model.__dict__[name] for name in _ATTRIBUTES if name in model.__dict__},
        "quantization_config": config if type(config).__name__ == "BitsAndBytesConfig" else None,
        "conversions": model.__dict__.get("_weight_conversions"),
    }


def _clear(model: nn.Module) -> None:
    for name in _ATTRIBUTES:
        model.__dict__.pop(name, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _drop_quantizer_conversions(model: nn.Module) -> None:
    """Forget the conversions of a quantizer's own tensors, which cannot be reversed; renamings and merges stay."""
    conversions = model.__dict__.get("_weight_conversions")
    if conversions is not None:
        model._weight_conversions = [
            conversion
            for conversion in conversions
            if not any(hasattr(operation, "hf_quantizer") for operation in getattr(conversion, "operations", ()))
        ]


def _adopt_bitsandbytes(model: nn.Module) -> None:
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    layers = {name: module for name, module in model.named_modules() if bnb.layer_bits(module)}
    if not layers:
        return
    first = next(iter(layers.values()))
    kept = [name for name, module in model.named_modules() if is_linear(module) and name not in layers]
    config = BitsAndBytesConfig(**bnb.config_options(first, model.dtype), llm_int8_skip_modules=kept)
    model.hf_quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
    model.quantization_method = config.quant_method
    model.is_quantized = True
    model.config.quantization_config = config
    setattr(model, f"is_loaded_in_{bnb.layer_bits(first)}bit", True)

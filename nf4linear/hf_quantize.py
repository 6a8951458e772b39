"""Quantizes a plain checkpoint while transformers loads it, layer by layer, so that 16-bit weights never pile up."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from .linear import PackedLinear
from .swap import swap_layer


class QuantizeLinear(ConversionOps):
    """Turns a loaded `<layer>.weight` into the packed tensors of a layer that takes the plain one's place."""

    def __init__(self, quantization_config: Any) -> None:
        self.rules = quantization_config.rules()

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        packed_tensors: dict[str, Tensor] = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            name = key.removesuffix(".weight")
            linear = model.get_submodule(name)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            layer = PackedLinear.from_linear(linear, name=name, **self.rules.entry(name))
            swap_layer(model, [name], linear, layer)
            packed_tensors |= {f"{name}.{part}": tensor for part, tensor in layer.packed().items()}
            if missing_keys is not None:
                missing_keys.discard(key)
        return packed_tensors

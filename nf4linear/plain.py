"""The plain layers that packed ones replace: nn.Linear, and transformers' Conv1D, which holds its weight transposed."""

from __future__ import annotations

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of any kind: plain, a subclass, bitsandbytes' or packed."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is exactly one of the two plain layers."""
    return type(module) is nn.Linear or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the layer of GPT-2 and its kin, with a weight [in_features, out_features]."""
    # By name, as transformers need not be there; only its class has `nf`.
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not isinstance(module, nn.Linear)


def out_in_features(layer: nn.Module) -> tuple[int, int]:
    """(out_features, in_features) of a plain layer, from its weight."""
    rows, columns = layer.weight.shape
    return (columns, rows) if is_conv1d(layer) else (rows, columns)

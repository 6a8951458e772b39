"""The layers of a model and the rules of a quantization_config: rules described from layers, layers found by rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .checkpoint.packed import ModuleRules, make_config
from .checkpoint.shards import CheckpointError
from .formats import WeightSpec
from .linear import PackedLinear
from .plain import is_linear, is_plain, out_in_features
from .select import places


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """The packed layers of a model by name; one that stands in several places by its first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def packed_places(model: nn.Module) -> dict[PackedLinear, tuple[str, ...]]:
    """The packed layers of a model with all their names."""
    return {module: names for module, names in places(model).items() if isinstance(module, PackedLinear)}


def describe_quantization(model: nn.Module) -> dict[str, Any]:
    """The quantization_config of a model with packed layers; its other linear layers are listed as not converted."""
    packed = packed_layers(model)
    kept = [name for name, module in model.named_modules() if is_linear(module) and name not in packed]
    packed_ends = {name.rpartition(".")[2] for name in packed}
    # The last part of a name is enough where no packed layer ends so.
    ends = [name if (end := name.rpartition(".")[2]) in packed_ends else end for name in kept]
    return make_config({name: layer.spec for name, layer in packed.items()}, list(dict.fromkeys(ends)))


def layers_to_pack(model: nn.Module, rules: ModuleRules) -> Iterator[tuple[tuple[str, ...], nn.Module, WeightSpec]]:
    """(names, module, spec) of each plain layer that is packed in a checkpoint with these rules."""
    for module, names in places(model).items():
        if not is_plain(module):
            continue
        known_as = aliases(model, names[0])
        if any(f".{alias}".endswith(f".{entry}") for alias in known_as for entry in rules.not_converted):
            continue
        entries = [rules.entry(alias) for alias in known_as]
        default = rules.modules.get("default")
        entry = next((entry for entry in entries if entry is not default), default)
        if entry is None:
            raise CheckpointError(f"{rules.where}: no format for layer {names[0]!r} and no default")
        yield names, module, rules.spec(names[0], entry, *out_in_features(module))


def aliases(model: nn.Module, name: str) -> tuple[str, ...]:
    """Names of a layer in checkpoints of this model and of the same model with or without a head."""
    prefix = getattr(model, "base_model_prefix", "")
    return (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if prefix else (name,)

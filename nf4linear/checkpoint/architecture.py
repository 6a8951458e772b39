"""The Linear layers of a checkpoint's model, found by building it on the meta device from its config.json."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..plain import is_conv1d, out_in_features
from ..select import head_can_be_untied, output_embedding, select_layers
from .shards import CheckpointError, read_json


@dataclass(frozen=True)
class Architecture:
    """What pack needs to know of a model; names are those of its modules.

    `shapes` maps each layer that can be quantized, and each that is skipped, to (out_features, in_features); of those,
    `conv1d` names GPT-2's transposed layers, whose 16-bit weight is stored [in_features, out_features]. `skipped` says
    why a layer stays in 16 bit, `unmatched` lists skip entries that name nothing.
    """

    shapes: dict[str, tuple[int, int]]
    conv1d: frozenset[str]
    skipped: dict[str, str]
    unmatched: list[str]
    modules: frozenset[str]
    rename: Callable[[str], str]  # from the name of a layer in checkpoints to the name of its module
    head: str | None  # the output embedding, if it is a linear layer
    head_tied_to: str | None  # the module whose weight a tied head shares
    head_can_be_untied: bool
    expert_parameters: int  # in fused 3-D expert weights, which are no linear layers


def read_architecture(folder: Path, skip: tuple[str, ...] = ()) -> Architecture:
    """The rules are patch_model's. Raises CheckpointError when transformers cannot build the model of config.json."""
    model = _build_on_meta(folder)
    selection = select_layers(model, skip)
    modules = {layer.name: layer.module for layer in selection.layers}
    modules |= {name: model.get_submodule(name) for name in selection.skipped}
    conv1d = frozenset(name for name, module in modules.items() if is_conv1d(module))
    names = {id(module): name for name, module in model.named_modules()}
    head = names.get(id(output_embedding(model)))
    tied = head is not None and f"{head}.weight" in (getattr(model, "all_tied_weights_keys", None) or {})
    return Architecture(
        shapes={name: out_in_features(module) for name, module in modules.items()},
        conv1d=conv1d,
        skipped=selection.skipped,
        unmatched=selection.unmatched,
        modules=frozenset(names.values()),
        rename=_renaming(model),
        head=head if head in modules else None,
        head_tied_to=names.get(id(model.get_input_embeddings())) if tied else None,
        head_can_be_untied=head_can_be_untied(model),
        expert_parameters=sum(p.numel() for p in model.parameters() if p.dim() == 3),
    )


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """How transformers finds the module of a checkpoint key: its renaming rules, then the base model's prefix."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    except (ImportError, AttributeError):  # transformers 4 renames inside from_pretrained
        rules = []
    modules = {name for name, _ in model.named_modules()}
    prefix = getattr(model, "base_model_prefix", "") + "."

    def rename(layer: str) -> str:
        if layer in modules:
            return layer
        key = layer + ".weight"
        for rule in rules:
            key, _ = rule.rename_source_key(key)
        renamed = key.removesuffix(".weight")
        candidates = (renamed, prefix + renamed, renamed.removeprefix(prefix))
        return next((name for name in candidates if name in modules), layer)

    return rename


def _build_on_meta(folder: Path) -> nn.Module:
    import transformers

    config_file = folder / "config.json"
    names = read_json(config_file).get("architectures") or []
    quiet = logging.getLogger("transformers")
    level = quiet.level
    try:
        quiet.setLevel(logging.ERROR)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # How the file is quantized must not matter to the shape of the model.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model_class = getattr(transformers, names[0], None) if names else transformers.AutoModel
        if model_class is None:
            raise ValueError(f"transformers {transformers.__version__} has no class {names[0]}")
        with torch.device("meta"):
            build = model_class.from_config if model_class is transformers.AutoModel else model_class._from_config
            return build(config)
    except Exception as error:  # anything an architecture's own code raises
        raise CheckpointError(
            f"{config_file}: cannot build the model {names[:1] or ''} to find its layers ({error}); "
            "load it with transformers and use nf4linear.patch_model and save_pretrained instead"
        ) from error
    finally:
        quiet.setLevel(level)

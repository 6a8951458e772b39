"""The Linear layers of a checkpoint's model, found by building it on the meta device from its config.json."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .shards import CheckpointError, read_json


@dataclass(frozen=True)
class Architecture:
    """What pack needs to know of a model: names are those of its modules.

    `linears` maps each plain nn.Linear to (out_features, in_features), `conv1d` the same for GPT-2's transposed layer,
    whose 16-bit weight is stored [in_features, out_features]; `kept` are the names (or last parts of names)
    that stay in 16 bit by default: tied and output layers, and modules the model wants in float32.
    """

    linears: dict[str, tuple[int, int]]
    conv1d: dict[str, tuple[int, int]]
    kept: tuple[str, ...]
    output: str | None  # the output head, if it is a Linear
    output_source: str | None  # name of the module whose weight a tied output head shares
    expert_parameters: int  # in fused 3-D expert weights, which are no Linear layers

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of every layer that can be quantized."""
        return self.linears | self.conv1d


def matches(name: str, entry: str) -> bool:
    """Whether a modules_to_not_convert entry names this module: its full name or a whole dotted suffix."""
    return name == entry or name.endswith("." + entry)


def read_architecture(folder: Path) -> Architecture:
    """Raises CheckpointError when transformers cannot build the model of this config.json without remote code."""
    from transformers.pytorch_utils import Conv1D

    model = _build_on_meta(folder)
    names = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings() if head is not None else None
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }
    conv1d = {
        name: (module.weight.shape[1], module.weight.shape[0])
        for name, module in model.named_modules()
        if type(module) is Conv1D
    }
    output = names.get(id(head))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    is_tied = output is not None and f"{output}.weight" in tied
    return Architecture(
        linears,
        conv1d,
        _kept_by_default(model),
        output if output in linears else None,
        names.get(id(embedding)) if is_tied else None,
        sum(p.numel() for p in model.parameters() if p.dim() == 3),
    )


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


def _kept_by_default(model: nn.Module) -> tuple[str, ...]:
    from transformers.quantizers.base import HfQuantizer

    fp32 = getattr(model, "_keep_in_fp32_modules", None)
    return tuple(sorted(HfQuantizer.get_modules_to_not_convert(model, None, fp32, add_default_skips=True)))

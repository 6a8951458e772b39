"""Which layers of a model can be packed, and why the others stay as they are."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from . import bnb
from .linear import PackedLinear
from .ops import FLOAT_DTYPES
from .plain import is_linear, is_plain

# Attribute of a model whose patching was cut short: names of the plain layers that were still to be replaced.
UNFINISHED = "_nf4linear_unfinished"


@dataclass(frozen=True)
class Layer:
    """A layer to be replaced; `names` are all the places of the model that hold it, the first one is its name."""

    names: tuple[str, ...]
    module: nn.Module
    bits: int | None  # 4 or 8 for a bitsandbytes layer, None for one that is to be quantized
    is_head: bool = False  # the output embedding of the model

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass
class Selection:
    layers: list[Layer] = field(default_factory=list)  # in the order of the model
    skipped: dict[str, str] = field(default_factory=dict)  # linear layers that stay -> the reason
    packed: dict[str, PackedLinear] = field(default_factory=dict)  # layers that are packed already
    unmatched: list[str] = field(default_factory=list)  # entries of the user's skip list that name nothing


def select_layers(model: nn.Module, skip: Iterable[str] = (), include_head: bool = False) -> Selection:
    """Sort the linear layers of `model` into those to replace and those that stay.

    A model that bitsandbytes or this package has quantized keeps its other layers as they were left then, unless
    patch_model was interrupted; in a plain model each nn.Linear (or Conv1D) is selected. `skip` adds to the rules:
    full names, globs, or any run of whole dotted parts. `include_head` selects the output embedding as well, tied or
    not.
    """
    skip = [skip] if isinstance(skip, str) else list(skip)
    modules = {names[0]: (module, names) for module, names in places(model).items()}
    has_bnb = any(bnb.layer_bits(module) and not bnb.skip_reason(module) for module, _ in modules.values())
    quantizer = "bitsandbytes" if has_bnb else quantization_method(model)
    unfinished = model.__dict__.get(UNFINISHED, ())
    head = output_embedding(model)
    reasons = _model_rules(model)
    selection = Selection(unmatched=[e for e in skip if not any(name_matches(name, e) for name in modules)])
    for name, (module, names) in modules.items():
        if isinstance(module, PackedLinear):
            selection.packed[name] = module
            continue
        if not is_linear(module):
            continue
        bits = bnb.layer_bits(module)
        reason = _user_rule(names, skip)
        if reason is None and not bits and not (include_head and module is head):
            left = quantizer is not None and name not in unfinished
            reason = reasons.get(name) or (f"{quantizer} left it unquantized" if left else None)
        reason = reason or _layer_rule(module, bits)
        if reason is None:
            selection.layers.append(Layer(names, module, bits, module is head))
        else:
            selection.skipped[name] = reason
    return selection


def quantization_method(model: nn.Module) -> str | None:
    """What transformers has loaded a model with, such as "bitsandbytes" or "nf4linear"; None while it still loads."""
    quantizer = getattr(model, "hf_quantizer", None)
    method = None if quantizer is None else quantizer.quantization_config.quant_method
    return None if method is None else str(getattr(method, "value", method))


def name_matches(name: str, entry: str) -> bool:
    """Whether an entry of a skip list means module `name`: equal, a glob, or a run of its whole dotted parts."""
    return f".{entry}." in f".{name}." or fnmatch.fnmatchcase(name, entry)


def places(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every module with all its names: a module that stands in several places of a model has several."""
    names: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names[module] = (*names.get(module, ()), name)
    return names


def _user_rule(names: tuple[str, ...], skip: list[str]) -> str | None:
    entry = next((entry for entry in skip for name in names if name_matches(name, entry)), None)
    return entry and f"in the skip list ({entry})"


def _layer_rule(module: nn.Module, bits: int | None) -> str | None:
    """Reasons that lie in the layer itself."""
    if bits:
        return bnb.skip_reason(module)
    if not is_plain(module):
        return f"a subclass of nn.Linear ({type(module).__name__})"
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed by something else"
    if module.weight.dtype not in FLOAT_DTYPES:
        return f"its weight is {module.weight.dtype}"
    if module.weight.numel() == 0:
        return "its weight is empty"
    if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):
        return "its forward method was replaced"
    return None


def _model_rules(model: nn.Module) -> dict[str, str]:
    """Reasons that lie in the rest of the model, by the name of the layer; for layers that are not quantized yet."""
    reasons: dict[str, str] = {}
    keep_fp32 = [
        entry
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for entry in getattr(model, attribute, None) or ()
    ]
    head, last = output_embedding(model), _last_module(model)
    names = [name for name, _ in model.named_modules()]
    for name, module in model.named_modules():
        # These read the weights of their layers past the layers' forward.
        if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            why = f"{type(module).__name__} reads its weight"
            reasons |= {f"{name}.{child}".removeprefix("."): why for child, _ in module.named_children()}
        # PEFT's wrappers list what they add to the layer that they wrap.
        for part in getattr(module, "adapter_layer_names", ()):
            prefix = f"{name}.{part}.".removeprefix(".")
            reasons |= {inner: "an adapter" for inner in names if inner.startswith(prefix)}
        if module is head:
            reasons[name] = "the output embedding"
        elif entry := next((entry for entry in keep_fp32 if name_matches(name, entry)), None):
            reasons[name] = f"the model keeps it in float32 ({entry})"
        elif name == last:
            reasons[name] = "the last layer of the model"
    return reasons | {name: f"its weight is tied to {other}" for name, other in _tied_modules(model).items()}


def _tied_modules(model: nn.Module) -> dict[str, str]:
    """Modules whose weight is also another one's: found by identity, and by declaration while nothing is loaded yet."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    groups = [names for names in owners.values() if len({id(model.get_submodule(name)) for name in names}) > 1]
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    groups += [[a.rpartition(".")[0], b.rpartition(".")[0]] for a, b in dict(declared).items()]
    pairs = [(name, other) for names in groups for name in names for other in names if name != other]
    return dict(reversed(pairs))


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The layer that makes logits of hidden states, None where a model has none."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # no transformers model, or one without such a layer
        return None


def head_can_be_untied(model: nn.Module) -> bool:
    """Whether the output embedding of `model` is untied, or its config can say that it is: T5's, for one, cannot."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return True
    return not type(config).from_dict(config.to_dict() | {"tie_word_embeddings": False}).tie_word_embeddings


def _last_module(model: nn.Module) -> str | None:
    """transformers leaves the owner of a model's last parameter (a classification head, say) unquantized."""
    if not hasattr(model, "get_output_embeddings"):
        return None
    names = [name for name, _ in model.named_parameters()]
    return names[-1].rpartition(".")[0] if names else None

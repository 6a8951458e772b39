"""Put one layer in the place of another without losing what hangs on it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def swap_layer(model: nn.Module, names: Iterable[str], old: nn.Module, new: nn.Module) -> None:
    """Make `new` stand wherever `old` stands in `model` (`names`), in the same mode and with the same hooks.

    Hook dictionaries are handed over, not copied, so that handles which callers hold can still remove their hooks.
    An accelerate hook (`_hf_hook`), which wraps the forward method of one module, is taken off and put on.
    """
    new.train(old.training)
    for attribute in _HOOKS:
        if attribute in old.__dict__:
            new.__dict__[attribute] = old.__dict__[attribute]
    hook = old.__dict__.get("_hf_hook")
    if hook is not None:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(old)
        add_hook_to_module(new, hook)
    for name in names:
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._modules[child] = new

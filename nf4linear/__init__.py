"""Fast, exact 4-bit and 8-bit linear layers that replace bitsandbytes' inside Hugging Face models.

    model = nf4linear.patch_model(AutoModelForCausalLM.from_pretrained(...))

Importing this package is cheap (nothing of torch, transformers or bitsandbytes is loaded before it is needed) and lets
transformers load packed checkpoints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .registration import register_with_transformers

if TYPE_CHECKING:
    from .checkpoint import CheckpointError, pack_checkpoint, unpack_checkpoint
    from .hf import NF4LinearConfig
    from .linear import NF4Linear, PackedLinear, W8Linear
    from .patch import patch_model, patched_loading, report, unpatch_model
    from .patch_report import PatchReport

# Public name -> the module that defines it, imported when the name is first used.
_HOME = {
    "CheckpointError": "checkpoint",
    "NF4Linear": "linear",
    "NF4LinearConfig": "hf",
    "PackedLinear": "linear",
    "PatchReport": "patch_report",
    "W8Linear": "linear",
    "pack_checkpoint": "checkpoint",
    "patch_model": "patch",
    "patched_loading": "patch",
    "report": "patch",
    "unpack_checkpoint": "checkpoint",
    "unpatch_model": "patch",
}
__all__ = [
    "CheckpointError",
    "NF4Linear",
    "NF4LinearConfig",
    "PackedLinear",
    "PatchReport",
    "W8Linear",
    "pack_checkpoint",
    "patch_model",
    "patched_loading",
    "report",
    "unpack_checkpoint",
    "unpatch_model",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .version import installed_version

        return installed_version()
    if name not in _HOME:
        raise AttributeError(f"module 'nf4linear' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])


register_with_transformers()

"""What patch_model did to a model, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from . import bnb
from .linear import PackedLinear
from .sizes import format_size


@dataclass
class PatchReport:
    """Printable. Sizes are bytes of all weights of the model; `parameters` counts weights, not packed bytes.

    replaced: layer name -> format; skipped: layer name -> reason; expert_bytes: weights of fused experts (3-D
    parameters), which are no linear layers and stay as they are; notes: whatever else a user should know.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    parameters: int = 0
    expert_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        formats = _count(self.replaced.values())
        before, after = format_size(self.bytes_before), format_size(self.bytes_after)
        lines = [
            f"nf4linear: {len(self.replaced)} layers replaced" + (f" ({formats})" if formats else ""),
            f"  weights: {before} -> {after}, {self.parameters:,} parameters",
        ]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  left as is: {', '.join(names[:3])}{more}: {reason}")
        if self.expert_bytes:
            lines.append(f"  not quantized: {format_size(self.expert_bytes)} of fused expert weights (3-D parameters)")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def count_parameters(model: nn.Module) -> int:
    """Parameters as in the unquantized model: a packed layer counts its weights, not its bytes and scales."""
    return sum(p.numel() for p in model.parameters()) + uncounted_weights(model)


def uncounted_weights(model: nn.Module) -> int:
    """Weights of the packed layers of a model less the elements that hold them: what counting elements misses."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    held = sum(p.numel() for module in packed for p in module.packed().values())
    return sum(module.in_features * module.out_features for module in packed) - held


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, statistics of bitsandbytes layers included."""
    tensors = [*model.parameters(), *model.buffers()]
    statistics = sum(bnb.statistics_bytes(module) for module in model.modules() if bnb.layer_bits(module))
    return sum(t.nbytes for t in tensors) + statistics


def expert_bytes(model: nn.Module) -> int:
    """Bytes of floating 3-D parameters: transformers 5 fuses the experts of a layer so.

    Convolutions and packed layers have such tensors too: kernels and scales.
    """
    return sum(
        p.nbytes
        for module in model.modules()
        if not isinstance(module, (nn.modules.conv._ConvNd, PackedLinear))
        for p in module.parameters(recurse=False)
        if p.dim() == 3 and p.is_floating_point()
    )


def _count(values) -> str:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return ", ".join(f"{value}: {n}" if len(counts) > 1 else value for value, n in counts.items())

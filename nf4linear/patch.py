"""patch_model: put NF4Linear and W8Linear in the place of a model's layers, in memory, and back."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from . import bnb, bookkeeping
from .formats import bitsandbytes_has, config_entry
from .linear import PackedLinear
from .model_rules import packed_places
from .patch_report import PatchReport, count_parameters, expert_bytes, weight_bytes
from .progress import Progress
from .select import UNFINISHED, Layer, head_can_be_untied, quantization_method, select_layers
from .swap import swap_layer

_REPORT = "_nf4linear_report"


def patch_model(
    model: nn.Module,
    *,
    format: str = "nf4",
    blocksize: int = 64,
    double_quant: bool = True,
    skip: Iterable[str] = (),
    lm_head: str | None = None,
    progress: bool = True,
) -> nn.Module:
    """Replace the linear layers of `model` by packed ones, in place, and return it.

    bitsandbytes layers are taken over code for code, whatever `format` says; a model without any has its plain
    nn.Linear (and Conv1D) layers quantized to `format` ("nf4", "fp4" or "w8_s8"), `blocksize` and `double_quant`.
    Output and tied embeddings, and layers that the model keeps in float32, stay; `skip` adds full names, globs or runs
    of dotted parts to that ("q_proj", "vision_tower"). `lm_head` ("w8", or any format) quantizes the output embedding
    too, untying it first. Old tensors are freed layer by layer. A transformers model can be saved with
    save_pretrained and loaded again afterwards.

    `report(model)` tells what was done. Raises ValueError, before anything is changed, for a model quantized by another
    method, and naming the layer when one is offloaded, not loaded, inconsistent or not finite.
    """
    entries = {False: config_entry(format, blocksize, double_quant)}  # by Layer.is_head
    if lm_head is not None:
        entries[True] = config_entry({"w8": "w8_s8"}.get(lm_head, lm_head), blocksize, double_quant)
    if (method := quantization_method(model)) not in (None, "bitsandbytes", "nf4linear"):
        raise ValueError(f"the model is quantized with {method!r}; patch_model takes bitsandbytes and plain models")
    selection = select_layers(model, skip, include_head=lm_head is not None)
    for unmatched in selection.unmatched:
        warnings.warn(f"patch_model: skip entry {unmatched!r} matches no module of the model", stacklevel=2)
    if not selection.layers:
        if not selection.packed:
            warnings.warn(f"patch_model: found no layer to replace in {type(model).__name__}", stacklevel=2)
        return model
    _check(model, selection.layers)
    report = _begin_report(model, selection.skipped)
    total = sum(_nbytes(layer.module) for layer in selection.layers)
    try:
        with Progress("packing", total, progress) as bar:
            _replace_all(model, selection.layers, entries, report, bar)
    finally:
        # Even a run cut short leaves a model that says truly which of its layers are packed, and can be run again.
        _note_unfinished(model, selection.layers)
        if packed_places(model):
            bookkeeping.adopt(model)
            _complete(report, model)
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Replace the packed layers of `model` by bitsandbytes layers with the same bytes, in place, and return it.

    A model that came from bitsandbytes gets its own quantization settings back.
    Raises ValueError, before anything is changed, if a layer has a format that bitsandbytes lacks.
    """
    places = packed_places(model)
    for layer in places:
        if not bitsandbytes_has(layer.spec):
            raise ValueError(
                f"{layer.describe()}: bitsandbytes has no such layer; model.dequantize() makes it a plain one"
            )
        if layer.qweight.is_meta:
            raise ValueError(f"{layer.describe()}: its weight is offloaded or not loaded; load the model to one device")
    for layer, names in places.items():
        swap_layer(model, names, layer, layer.to_bnb())
    if places:
        bookkeeping.release(model)
    for attribute in (_REPORT, UNFINISHED):
        model.__dict__.pop(attribute, None)
    return model


def report(model: nn.Module) -> PatchReport:
    """What patch_model did to `model`. Raises ValueError if it did nothing to it."""
    try:
        return model.__dict__[_REPORT]
    except KeyError:
        raise ValueError(f"{type(model).__name__} was not patched; call nf4linear.patch_model(model) first") from None


@contextmanager
def patched_loading(**options: Any) -> Iterator[None]:
    """While active, every model that transformers' from_pretrained returns has gone through patch_model(**options)."""
    from transformers import PreTrainedModel

    if unknown := set(options) - set(inspect.signature(patch_model).parameters) | ({"model"} & set(options)):
        raise TypeError(f"patched_loading takes the options of patch_model, not {sorted(unknown)}")
    original = PreTrainedModel.__dict__["from_pretrained"]

    @classmethod
    @functools.wraps(original.__func__)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        loaded = original.__get__(None, cls)(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
        patch_model(model, **options)
        return loaded

    PreTrainedModel.from_pretrained = from_pretrained
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original


def _begin_report(model: nn.Module, skipped: dict[str, str]) -> PatchReport:
    """A new report; after a run that was cut short it counts from where that one began."""
    earlier = model.__dict__.get(_REPORT) if UNFINISHED in model.__dict__ else None
    if earlier is None:
        return PatchReport(skipped=skipped, bytes_before=weight_bytes(model))
    return PatchReport(dict(earlier.replaced), skipped, earlier.bytes_before, notes=list(earlier.notes))


def _note_unfinished(model: nn.Module, layers: list[Layer]) -> None:
    model.__dict__.pop(UNFINISHED, None)
    if names := {layer.name for layer in layers if not layer.bits}:
        model.__dict__[UNFINISHED] = names


def _check(model: nn.Module, layers: list[Layer]) -> None:
    """Find what would stop the replacement half way, or the patched model from being loaded again."""
    for layer in layers:
        if layer.is_head and not layer.bits and not head_can_be_untied(model):
            raise ValueError(
                f"{layer.name}: {type(model.config).__name__} always ties it to the input embedding; leave lm_head out"
            )
        if layer.name == "":
            raise ValueError(
                "patch_model replaces layers inside a model; use from_linear or from_bnb for a single layer"
            )
        tensors = [layer.module.weight, layer.module.bias]
        if any(t is not None and t.is_meta for t in tensors):
            raise ValueError(
                f"{layer.name}: its weight is offloaded or not loaded. Load the model without offloading, or pack the "
                "checkpoint (nf4linear pack) and load that with the device_map"
            )
        if layer.bits:
            bnb.check_layer(layer.module, layer.name)
        elif not torch.isfinite(layer.module.weight).all():
            raise ValueError(f"{layer.name}: its weight holds NaN or infinity; quantize a sound checkpoint, or skip it")


def _replace_all(
    model: nn.Module,
    layers: list[Layer],
    entries: dict[bool, dict[str, Any]],
    report: PatchReport,
    bar: Progress,
) -> None:
    """Empties `layers` as it goes, so that each old layer is freed before the next one is packed."""
    done: list[tuple[tuple[str, ...], PackedLinear]] = []
    from_bnb = all(layer.bits for layer in layers)
    try:
        while layers:
            layer = layers[0]
            nbytes = _nbytes(layer.module)
            if layer.bits:
                packed = PackedLinear.from_bnb(layer.module, name=layer.name, dtype=_model_dtype(model))
            else:
                packed = PackedLinear.from_linear(layer.module, name=layer.name, **entries[layer.is_head])
                if layer.is_head and bookkeeping.untie(model, layer.name):
                    report.notes.append(f"{layer.name} was tied to the input embedding; they are separate now")
            swap_layer(model, layer.names, layer.module, packed)
            layers.pop(0)
            done.append((layer.names, packed))
            report.replaced[layer.name] = packed.spec.format
            bar.advance(nbytes, layer.name)
            del layer
    except BaseException:
        for names, packed in done if from_bnb else ():
            swap_layer(model, names, packed, packed.to_bnb())
        raise


def _model_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of a transformers model's activations; unlike bitsandbytes' own notes it knows how it was loaded."""
    return model.dtype if bookkeeping.is_transformers_model(model) else None


def _complete(report: PatchReport, model: nn.Module) -> None:
    report.bytes_after = weight_bytes(model)
    report.parameters = count_parameters(model)
    report.expert_bytes = expert_bytes(model)
    if report.expert_bytes:
        warnings.warn(
            f"{report.expert_bytes:,} bytes of fused expert weights (3-D parameters) are not quantized and stay as "
            "they are; nf4linear.report(model) has the whole account",
            stacklevel=4,
        )
    model.__dict__[_REPORT] = report


def _nbytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters(recurse=False))

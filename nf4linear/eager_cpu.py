"""The short way from an eager module call to the CPU library (see eager.py for what may take it)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .formats import WeightSpec


class BoundCpuWeight:
    """One layer's CPU weight as the library takes it, for activations of one dtype; valid while the pointers are.

    A copied or unpickled layer starts without one.
    """

    __slots__ = ("_library", "_spec", "_weight", "dtype", "pointers")

    def __init__(
        self,
        spec: WeightSpec,
        library: native.CpuLibrary,
        tensors: tuple[Tensor | None, ...],
        pointers: tuple[int, ...],
        dtype: torch.dtype,
    ):
        self.pointers = pointers
        self.dtype = dtype
        self._spec = spec
        self._library = library
        self._weight = native.describe_weight(spec, *tensors)

    def __reduce__(self) -> tuple:
        return type(None), ()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x [..., k] times the weight; None where the operator has to do it. The caller has checked `plain_call`."""
        spec = self._spec
        if not x.is_contiguous() or not x.is_cpu or x.numel() == 0 or x.data_ptr() % x.element_size():
            return None
        if x.shape[-1:] != (spec.k,):
            return None
        if bias is not None and (
            bias.dtype != self.dtype or bias.shape != (spec.n,) or not bias.is_contiguous() or not bias.is_cpu
        ):
            return None
        y = x.new_empty((*x.shape[:-1], spec.n))
        if not self._library.linear(self._weight, x.view(-1, spec.k), bias, y):
            return None
        return y


def are_packed(spec: WeightSpec, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the weight arguments have the dtypes and shapes of the spec: a library takes their bare pointers."""
    packed = spec.packed_tensors()
    names = ("qweight", spec.scales_name, "nested_code", "nested_absmax", "nested_offset")
    wanted = ((packed[name].dtype, packed[name].shape) if name in packed else None for name in names)
    return all(
        t is None if want is None else t is not None and (t.dtype, tuple(t.shape)) == want
        for t, want in zip(tensors, wanted, strict=True)
    )


def bind(
    spec: WeightSpec, tensors: tuple[Tensor | None, ...], pointers: tuple[int, ...], x: Tensor
) -> BoundCpuWeight | None:
    """The weight bound for inputs like `x`; None where the library may not take it."""
    if x.dtype not in native.DTYPE_IDS or spec.layout == "flat":
        return None
    if any(t is not None and (not t.is_cpu or not t.is_contiguous()) for t in tensors):
        return None
    if any(t.data_ptr() % 16 for t in tensors[:2]) or not are_packed(spec, tensors):
        return None
    library = native.library("cpu")
    return BoundCpuWeight(spec, library, tensors, pointers, x.dtype) if library else None

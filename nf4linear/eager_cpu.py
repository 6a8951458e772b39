"""The short way from an eager module call to the CPU library (see eager.py for what may take it)."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from . import native
from .formats import WeightSpec


class BoundCpuWeight:
    """One layer's CPU weight as the library takes it, for activations of one dtype; valid while the pointers are.

    A copied or unpickled layer starts without one.
    """

    __slots__ = ("_args", "_k", "_launch", "_library", "_n", "_weight", "dtype", "pointers")

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
        self._n, self._k = spec.n, spec.k
        self._library = library
        self._launch = library.launch
        self._weight = byref(native.describe_weight(spec, *tensors))
        # Argument structs that no call is using: one a call that runs at the same time.
        self._args: list[native.LinearArgs] = []

    def __reduce__(self) -> tuple:
        return type(None), ()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x [..., k] times the weight; None where the operator has to do it. The caller has checked `plain_call`."""
        n, dtype = self._n, self.dtype
        rows = x.numel() // self._k
        x_pointer = x.data_ptr()
        if rows == 0 or not x.is_contiguous() or not x.is_cpu or x_pointer % dtype.itemsize:
            return None
        bias_pointer = None
        if bias is not None:
            if bias.dtype != dtype or bias.shape != (n,) or not bias.is_contiguous() or not bias.is_cpu:
                return None
            bias_pointer = bias.data_ptr()
        y = x.new_empty(*x.shape[:-1], n)
        free = self._args
        try:
            args = free.pop()
        except IndexError:
            args = native.LinearArgs(native.DTYPE_IDS[dtype], 0, 0, None, self._k, None, None, None, 0)
        args.m, args.x, args.bias, args.y = rows, x_pointer, bias_pointer, y.data_ptr()
        if dtype is torch.float32:
            args.flags = native.ALLOW_BF16 if native.bf16_allowed() else 0
        status = self._launch(self._weight, byref(args), torch.get_num_threads())
        free.append(args)
        if status == native.OK:
            return y
        self._library.check(status, "linear")
        return None


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

"""The short way from an eager module call to the CPU library (see eager.py for what may take it)."""

from __future__ import annotations

from ctypes import addressof

import torch
from torch import Tensor

from . import native
from .formats import WeightSpec
from .native import OK, cpu_flags, misfit, pack_linear_args

# Looked up once, see eager.py.
_empty_like, _get_num_threads = torch.empty_like, torch.get_num_threads
MOST_KEPT_ROWS = 16


class BoundCpuWeight:
    """One layer's CPU weight as the library takes it, for activations of one dtype; valid while the pointers are.

    A copied or unpickled layer starts without one.
    """

    __slots__ = (
        "_calls", "_dtype_id", "_itemsize", "_k", "_launch", "_library", "_spec", "_tables", "_weight",
        "_weight_pointer", "dtype", "pointers",
    )  # fmt: skip

    def __init__(
        self,
        spec: WeightSpec,
        library: native.CpuLibrary,
        tensors: tuple[Tensor | None, ...],
        pointers: tuple[int, int],
        dtype: torch.dtype,
    ):
        self.pointers = pointers
        self._tables = [t.detach() for t in tensors[2:] if t is not None]
        self.dtype = dtype
        self._spec = spec
        self._k = spec.k
        self._library = library
        self._launch = library.launch
        self._weight = native.describe_weight(spec, *tensors)
        self._weight_pointer = addressof(self._weight)
        self._dtype_id = native.DTYPE_IDS[dtype]
        self._itemsize = dtype.itemsize
        self._calls: dict[torch.Size, tuple[int, Tensor]] = {}

    def __reduce__(self) -> tuple:
        return type(None), ()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x [..., k] times the weight; None where the operator has to do it. The caller has checked `plain_call`."""
        x_pointer = x.data_ptr()
        if not x.is_cpu or not x.is_contiguous() or x_pointer % self._itemsize:
            return None
        call = self._calls.get(x.shape) or self._prepare(x)
        if call is None:
            return None
        bias_pointer = 0
        if bias is not None:
            if not self._takes_bias(bias):
                return None
            bias_pointer = bias.data_ptr()
        rows, output = call
        y = _empty_like(output)
        flags = cpu_flags(x.dtype)
        args = pack_linear_args(self._dtype_id, flags, rows, x_pointer, self._k, bias_pointer, y.data_ptr(), 0, 0)
        status = self._launch(self._weight_pointer, args, _get_num_threads())
        if status == OK:
            return y
        self._library.check(status, "linear")
        return None

    def _takes_bias(self, bias: Tensor) -> bool:
        return bias.dtype == self.dtype and bias.shape == (self._spec.n,) and bias.is_contiguous() and bias.is_cpu

    def _prepare(self, x: Tensor) -> tuple[int, Tensor] | None:
        """Rows of x, and the output's shape and dtype on one element of memory; None for what is the operator's.

        Kept for the shapes of decoding, which come again: prompts have any length.
        """
        rows = x.numel() // self._spec.k
        if x.shape[-1:] != (self._spec.k,) or rows == 0:
            return None
        call = rows, x.new_empty(1).expand(*x.shape[:-1], self._spec.n)
        if rows <= MOST_KEPT_ROWS:
            self._calls[x.shape] = call
        return call


def bind(
    spec: WeightSpec, tensors: tuple[Tensor | None, ...], pointers: tuple[int, int], x: Tensor
) -> BoundCpuWeight | None:
    """The weight bound for inputs like `x`; None where the library may not take it."""
    if x.dtype not in native.DTYPE_IDS or spec.layout == "flat":
        return None
    if not tensors[0].is_cpu or misfit(spec, tensors) or any(t.data_ptr() % 16 for t in tensors[:2]):
        return None
    library = native.library("cpu")
    return BoundCpuWeight(spec, library, tensors, pointers, x.dtype) if library else None

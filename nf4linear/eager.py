"""The short way from an eager module call to a fused kernel, past torch's dispatcher: on CUDA here, else eager_cpu.py.

Decoding calls every layer once a token, and through the operator the host would take longer to ask than the GPU to
answer. Where nothing needs the dispatcher (no gradient, autocast, mode, transform, tracing or tensor subclass) the
module calls the library itself, with an argument struct kept from call to call. Every case that is not plain goes the
long way, with the same result.
"""

from __future__ import annotations

from ctypes import addressof
from typing import NamedTuple

import torch
from torch import Tensor

from . import eager_cpu, native, selfcheck
from .formats import FourBitSpec, WeightSpec

# Looked up once: between two layers of a model the tables of torch's modules leave the caches, and a name in them costs
# more than the call.
_is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_active, _tracing_state = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_data_ptr = Tensor.data_ptr

# Inputs with more tokens are prompts, whose lengths rarely come back: nothing about their shapes is kept.
MOST_KEPT_TOKENS = 64


def most_tokens(spec: WeightSpec) -> int:
    """Longer inputs are left to the operator without asking: no fused kernel takes them (csrc/dispatch.h), or they take
    so long that its microseconds do not show."""
    if isinstance(spec, FourBitSpec):
        return 128
    return 32 if spec.group_size else 4096


def plain_call(x: Tensor, bias: Tensor | None) -> bool:
    """Whether `x` is an ordinary CUDA or CPU tensor and neither autograd nor any mode has to see the call."""
    if type(x) is not Tensor:
        return False
    if x.is_cuda:
        device = "cuda"
    elif x.is_cpu:
        device = "cpu"
    else:
        return False
    return (
        not ((x.requires_grad or (bias is not None and bias.requires_grad)) and _is_grad_enabled())
        and not _is_autocast_enabled(device)
        and _dispatch_modes() == 0
        and _function_modes() == 0
        and not _functorch_active()
        and _tracing_state() is None
    )


class _Call(NamedTuple):
    """What all calls with one input shape have in common."""

    tokens: int
    output: Tensor  # the output's shape and dtype on one element of memory: empty_like is half the price of new_empty
    workspace_bytes: int


class BoundWeight:
    """One layer's CUDA weight as the library takes it, for activations of one dtype; valid while the pointers are.

    A copied or unpickled layer starts without one.
    """

    __slots__ = (
        "_calls", "_device", "_dtype_id", "_library", "_settled", "_spec", "_tables", "_weight", "_weight_pointer",
        "dtype", "pointers",
    )  # fmt: skip

    def __init__(self, spec: WeightSpec, library: native.CudaLibrary, tensors: tuple, device: int, dtype: torch.dtype):
        self.pointers = data_pointers(*tensors[:2])
        self._tables = [t.detach() for t in tensors[2:] if t is not None]
        self.dtype = dtype
        self._spec = spec
        self._library = library
        self._device = device
        self._dtype_id = native.DTYPE_IDS[dtype]
        self._weight = native.describe_weight(spec, *tensors)
        self._weight_pointer = addressof(self._weight)
        self._calls: dict[torch.Size, _Call | None] = {}  # None: the operator takes inputs of this shape
        self._settled = False

    def __reduce__(self) -> tuple:
        return type(None), ()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x [..., k] times the weight; None where the operator has to do it. The caller has checked `plain_call`."""
        x_pointer = x.data_ptr()
        if x.get_device() != self._device or torch._C._cuda_getDevice() != self._device:
            return None
        if x_pointer % 16 or not x.is_contiguous():
            return None
        shape = x.shape
        call = self._calls[shape] if shape in self._calls else self._prepare(x)
        if call is None:
            return None
        bias_pointer = 0
        if bias is not None:
            if not self._takes_bias(bias):
                return None
            bias_pointer = bias.data_ptr()
        y = torch.empty_like(call.output)
        workspace_pointer = 0
        if call.workspace_bytes:
            workspace = x.new_empty(call.workspace_bytes, dtype=torch.uint8)
            workspace_pointer = workspace.data_ptr()
        # The first call starts after whatever wrote the weight; from then on its reads may start early.
        flags = native.DEPENDENT_LAUNCH if self._settled else 0
        args = native.pack_linear_args(
            self._dtype_id, flags, call.tokens, x_pointer, shape[-1], bias_pointer, y.data_ptr(),
            workspace_pointer, call.workspace_bytes,
        )  # fmt: skip
        status = self._library.launch(self._weight_pointer, args, torch._C._cuda_getCurrentRawStream(self._device))
        if status != native.OK:
            # No kernel for this many tokens, or none for this GPU: the operator knows what to do, and what to say.
            if call.tokens <= MOST_KEPT_TOKENS:
                self._calls[shape] = None
            return None
        self._settled = True
        return y

    def _takes_bias(self, bias: Tensor) -> bool:
        if bias.dtype != self.dtype or bias.get_device() != self._device:
            return False
        return bias.shape == (self._spec.n,) and bias.is_contiguous()

    def _prepare(self, x: Tensor) -> _Call | None:
        """What calls of x's shape share, kept for few tokens; None for a shape that is the operator's."""
        n, k = self._spec.n, self._spec.k
        tokens, call = x.numel() // k, None
        if x.shape[-1:] == (k,) and 0 < tokens <= most_tokens(self._spec):
            pointer = x.data_ptr()  # stands for y's too: nothing is launched
            args = native.LinearArgs(self._dtype_id, 0, tokens, pointer, k, None, pointer, None, 0)
            workspace = self._library.workspace_bytes(self._weight, args)
            call = _Call(tokens, x.new_empty(1).expand(*x.shape[:-1], n), workspace)
        if tokens <= MOST_KEPT_TOKENS:
            self._calls[x.shape] = call
        return call


def data_pointers(qweight: Tensor, scales: Tensor) -> tuple[int, int]:
    """What tells a bound weight that its layer was moved or refilled.

    Only these two: asking all five tensors costs microseconds between two layers, when none of them is in a cache. The
    nested tables, which no one replaces alone, are kept alive by whoever holds pointers to them.
    """
    return _data_ptr(qweight), _data_ptr(scales)


Bound = BoundWeight | eager_cpu.BoundCpuWeight


def bind(spec: WeightSpec, tensors: tuple[Tensor | None, ...], x: Tensor) -> Bound | None:
    """The weight bound for inputs like `x`; None where no fused kernel may take it."""
    if x.is_cpu:
        return eager_cpu.bind(spec, tensors, data_pointers(*tensors[:2]), x)
    if x.dtype not in (torch.float16, torch.bfloat16) or spec.layout == "flat":
        return None
    if x.get_device() != torch.cuda.current_device():
        return None
    if any(t is not None and (t.device != x.device or not t.is_contiguous()) for t in tensors):
        return None
    if any(t.data_ptr() % 16 for t in tensors[:2]) or not eager_cpu.are_packed(spec, tensors):
        return None
    library = native.library("cuda")
    if not library or not selfcheck.fused_allowed(library, x.get_device(), x.dtype, spec):
        return None
    return BoundWeight(spec, library, tensors, x.get_device(), x.dtype)

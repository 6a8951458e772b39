"""The short way from an eager module call to a fused kernel, past torch's dispatcher: on CUDA here, else eager_cpu.py.

Decoding calls every layer once a token, and through the operator the host would take longer to ask than the GPU to
answer. Where nothing needs the dispatcher (no gradient, autocast, mode, transform, tracing or tensor subclass) the
module calls the library itself, with an argument struct kept from call to call: for a fused kernel, or where none takes
the call, to dequantize the weight for the framework's GEMM. Every case that is not plain goes the long way, with the
same result.
"""

from __future__ import annotations

import math
from ctypes import addressof
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import eager_cpu, native, selfcheck
from .formats import FourBitSpec, WeightSpec
from .native import DEPENDENT_LAUNCH, OK, USE_GEMM, misfit, pack_linear_args

# Looked up once: between two layers of a model the tables of torch's modules leave the caches, and a name in them costs
# more than the call.
_is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_active, _tracing_state = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_data_ptr, _empty_like, _gemm = Tensor.data_ptr, torch.empty_like, F.linear
# A torch without CUDA has neither, and no CUDA tensor to ask for them.
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Inputs with more tokens are prompts, whose lengths rarely come back: nothing about their shapes is kept.
MOST_KEPT_TOKENS = 64


def most_fused_tokens(spec: WeightSpec) -> float:
    """With more tokens no GPU has a fused kernel for such a weight (csrc/dispatch.h), so the library is not asked."""
    if isinstance(spec, FourBitSpec):
        return 8192
    return 64 if spec.group_size else math.inf


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
    # The output's shape and dtype on one element of memory: empty_like is half the price of new_empty.
    output: Tensor | None
    workspace_bytes: int


# The call of every shape that no fused kernel takes.
_BY_GEMM = _Call(0, None, 0)


class BoundWeight:
    """One layer's CUDA weight as the library takes it, for activations of one dtype; valid while the pointers are.

    A copied or unpickled layer starts without one.
    """

    __slots__ = (
        "_calls", "_dense", "_device", "_dtype_id", "_element", "_launch", "_launch_dequantize", "_library",
        "_most_fused_tokens", "_settled", "_spec", "_tables", "_weight", "_weight_pointer", "dtype", "pointers",
    )  # fmt: skip

    def __init__(self, spec: WeightSpec, library: native.CudaLibrary, tensors: tuple, device: int, dtype: torch.dtype):
        self.pointers = data_pointers(*tensors[:2])
        self._tables = [t.detach() for t in tensors[2:] if t is not None]
        self.dtype = dtype
        self._spec = spec
        self._most_fused_tokens = most_fused_tokens(spec)
        # One element for what only lends its shape and dtype (_Call.output): every allocation of a GPU takes 512 bytes.
        self._element = tensors[0].new_empty(1, dtype=dtype)
        self._dense = self._element.expand(spec.n, spec.k)
        self._library = library
        self._launch, self._launch_dequantize = library.launch, library.launch_dequantize
        self._device = device
        self._dtype_id = native.DTYPE_IDS[dtype]
        self._weight = native.describe_weight(spec, *tensors)
        self._weight_pointer = addressof(self._weight)
        self._calls: dict[torch.Size, _Call] = {}
        self._settled = False

    def __reduce__(self) -> tuple:
        return type(None), ()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x [..., k] times the weight; None where the operator has to do it. The caller has checked `plain_call`."""
        x_pointer = x.data_ptr()
        if x.get_device() != self._device or _current_device() != self._device:
            return None
        if x_pointer % 16 or not x.is_contiguous():
            return None
        shape = x.shape
        call = self._calls.get(shape) or self._prepare(x)
        if call is None:
            return None
        bias_pointer = 0
        if bias is not None:
            if not self._takes_bias(bias):
                return None
            bias_pointer = bias.data_ptr()
        if call is _BY_GEMM:
            return self._linear_gemm(x, bias)
        tokens, output, workspace_bytes = call
        y = _empty_like(output)
        workspace_pointer = 0
        if workspace_bytes:
            workspace = x.new_empty(workspace_bytes, dtype=torch.uint8)
            workspace_pointer = workspace.data_ptr()
        # The first call starts after whatever wrote the weight; from then on its reads may start early.
        flags = DEPENDENT_LAUNCH if self._settled else 0
        args = pack_linear_args(
            self._dtype_id, flags, tokens, x_pointer, shape[-1], bias_pointer, y.data_ptr(),
            workspace_pointer, workspace_bytes,
        )  # fmt: skip
        status = self._launch(self._weight_pointer, args, _current_stream(self._device))
        if status == OK:
            self._settled = True
            return y
        del y  # its memory can be the GEMM's
        if status != USE_GEMM:
            return None  # the operator knows what to do, and what to say
        self._keep(shape, tokens, _BY_GEMM)
        return self._linear_gemm(x, bias)

    def _linear_gemm(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """As ops._linear_gemm, to the bit: the whole weight for this call alone, and the framework's GEMM."""
        dense = _empty_like(self._dense)
        stream = _current_stream(self._device)
        if self._launch_dequantize(self._weight_pointer, self._dtype_id, dense.data_ptr(), stream) != OK:
            return None
        if 2 <= x.dim() <= 3:  # the framework makes one matrix of the three itself
            return _gemm(x, dense, bias)
        return _gemm(x.view(-1, self._spec.k), dense, bias).view(*x.shape[:-1], self._spec.n)

    def _takes_bias(self, bias: Tensor) -> bool:
        if bias.dtype != self.dtype or bias.get_device() != self._device:
            return False
        return bias.shape == (self._spec.n,) and bias.is_contiguous()

    def _prepare(self, x: Tensor) -> _Call | None:
        """What calls of x's shape share, kept for few tokens; None for a shape that is the operator's."""
        n, k = self._spec.n, self._spec.k
        tokens = x.numel() // k
        if tokens == 0 or x.shape[-1] != k:
            return None
        if tokens > self._most_fused_tokens:
            return _BY_GEMM
        pointer = x.data_ptr()  # stands for y's too: nothing is launched
        args = native.LinearArgs(self._dtype_id, 0, tokens, pointer, k, None, pointer, None, 0)
        workspace_bytes = self._library.workspace_bytes(self._weight, args)
        call = _Call(tokens, self._element.expand(*x.shape[:-1], n), workspace_bytes)
        self._keep(x.shape, tokens, call)
        return call

    def _keep(self, shape: torch.Size, tokens: int, call: _Call) -> None:
        if tokens <= MOST_KEPT_TOKENS:
            self._calls[shape] = call


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
    if tensors[0].device != x.device or misfit(spec, tensors) or any(t.data_ptr() % 16 for t in tensors[:2]):
        return None
    library = native.library("cuda")
    if not library or not selfcheck.fused_allowed(library, x.get_device(), x.dtype, spec):
        return None
    if library.lacks_code_for(x.get_device()):
        return None
    return BoundWeight(spec, library, tensors, x.get_device(), x.dtype)

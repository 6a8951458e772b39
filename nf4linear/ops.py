"""The operators nf4linear::dequantize and nf4linear::linear: schemas, checks, fakes, gradients.

Both take the packed tensors of one weight as plain arguments, so that torch.compile sees what they read:

    qweight, scales             packed codes and block (or row) scales, see formats.py
    nested_code, nested_absmax, nested_offset     second-level scales, all None without double quantization
    format, n, k, blocksize     the spec; blocksize is the group size of 8-bit formats, 0 for one scale a row
    settled                     linear only: no kernel that may still run writes the weight, so on CUDA its first reads
                                may overlap with the previous kernel (programmatic dependent launch)

CPU and CUDA tensors go to the native libraries where there are any, everything else to the torch reference. The result
never depends on which was picked, up to the order of summation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native, reference, reorder, selfcheck
from .formats import FourBitSpec, WeightSpec, make_spec

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_WEIGHT = "Tensor qweight, Tensor scales, Tensor? nested_code, Tensor? nested_absmax, Tensor? nested_offset"
_SPEC = "str format, int n, int k, int blocksize"
_library = torch.library.Library("nf4linear", "DEF")
_library.define(f"dequantize({_WEIGHT}, {_SPEC}, ScalarType dtype) -> Tensor")
_library.define(f"linear(Tensor x, {_WEIGHT}, Tensor? bias, {_SPEC}, bool settled=False) -> Tensor")


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_weight(spec: WeightSpec, *tensors: Tensor | None) -> None:
    """Refuse packed tensors a kernel would misread."""
    if problem := native.misfit(spec, tensors):
        raise ValueError(problem)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"cannot dequantize to {dtype}; nf4linear writes float32, float16 or bfloat16")


def _check_input(x: Tensor, bias: Tensor | None, n: int, k: int) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"input is {x.dtype}; nf4linear takes float32, float16 or bfloat16 activations")
    if x.dim() == 0 or x.shape[-1] != k:
        got = x.shape[-1] if x.dim() else "no dimension and so no"
        raise ValueError(f"input has {got} features in its last dimension, the layer takes in_features={k}")
    if bias is None:
        return
    if bias.dtype != x.dtype:
        raise TypeError(f"bias is {bias.dtype} but the input is {x.dtype}; cast one of them")
    if bias.dim() != 1 or bias.shape[0] != n:
        raise ValueError(f"bias is {list(bias.shape)}, the layer has out_features={n}")
    if bias.device != x.device:
        raise ValueError(f"bias is on {bias.device} but the input is on {x.device}; move one of them")


# ---- dequantize ------------------------------------------------------------------------------------------------------


def packed_dict(
    spec: WeightSpec,
    qweight: Tensor,
    scales: Tensor,
    nested_code: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
) -> dict[str, Tensor]:
    """Operator arguments back as the named tensors of `spec.packed_tensors()`."""
    tensors = {"qweight": qweight, spec.scales_name: scales}
    if isinstance(spec, FourBitSpec):
        tensors["code"] = torch.tensor(spec.codebook.code, dtype=torch.float32, device=qweight.device)
        if spec.double_quant:
            tensors |= {"nested_code": nested_code, "nested_absmax": nested_absmax, "nested_offset": nested_offset}
    return tensors


def _dequantize_reference(qweight, scales, nested_code, nested_absmax, nested_offset, format, n, k, blocksize, dtype):
    spec = make_spec(format, n, k, blocksize, nested_code is not None)
    weight = (qweight, scales, nested_code, nested_absmax, nested_offset)
    _check_dtype(dtype)
    _check_weight(spec, *weight)
    return reference.dequantize(spec, reorder.unpack(spec, packed_dict(spec, *weight)), dtype)


def _aligned(weight: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The weight with codes and scales that start at 16 bytes: a loader may have mapped them at any place of a file."""
    codes_and_scales = (t if t.data_ptr() % 16 == 0 else t.clone() for t in weight[:2])
    return *codes_and_scales, *weight[2:]


def _dequantize_native(qweight, scales, nested_code, nested_absmax, nested_offset, format, n, k, blocksize, dtype):
    weight = (qweight, scales, nested_code, nested_absmax, nested_offset)
    library = native.library(qweight.device.type)
    if library:
        spec = make_spec(format, n, k, blocksize, nested_code is not None)
        _check_dtype(dtype)
        _check_weight(spec, *weight)
        weight = _aligned(weight)
        out = qweight.new_empty((n, k), dtype=dtype)
        if library.dequantize(native.describe_weight(spec, *weight), out):
            return out
    return _dequantize_reference(*weight, format, n, k, blocksize, dtype)


# ---- linear ----------------------------------------------------------------------------------------------------------


def _linear_gemm(
    x, qweight, scales, nested_code, nested_absmax, nested_offset, bias, format, n, k, blocksize, settled=False
):
    """Dequantize, then the framework's GEMM: the row of the dispatch table that takes every call."""
    _check_input(x, bias, n, k)
    _check_same_device(x, qweight)
    weight = dequantize(qweight, scales, nested_code, nested_absmax, nested_offset, format, n, k, blocksize, x.dtype)
    rows = x.reshape(-1, k)
    if not torch.is_autocast_enabled(x.device.type):
        return F.linear(rows, weight, bias).view(*x.shape[:-1], n)
    # The operator's contract is output dtype = input dtype: autocast acts before it, not inside.
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(rows, weight, bias).view(*x.shape[:-1], n)


def _linear_native(
    x, qweight, scales, nested_code, nested_absmax, nested_offset, bias, format, n, k, blocksize, settled=False
):
    weight = (qweight, scales, nested_code, nested_absmax, nested_offset)
    library = native.library(x.device.type)
    if library:
        spec = make_spec(format, n, k, blocksize, nested_code is not None)
        _check_input(x, bias, n, k)
        _check_same_device(x, qweight)
        _check_weight(spec, *weight)
        y = x.new_empty((*x.shape[:-1], n))
        if y.numel() == 0:
            return y
        if not x.is_cuda or selfcheck.fused_allowed(library, x.device.index, x.dtype, spec):
            rows = kernel_rows(x.reshape(-1, k))
            bias = bias if bias is None else bias.contiguous()
            aligned = _aligned(weight)
            settled = settled and all(a is b for a, b in zip(aligned, weight, strict=True))
            flags = native.DEPENDENT_LAUNCH if settled else 0
            if library.linear(native.describe_weight(spec, *aligned), rows, bias, y.view(-1, n), flags):
                return y
        del y  # its memory can be the GEMM's
    return _linear_gemm(x, *weight, bias, format, n, k, blocksize)


def _check_same_device(x: Tensor, qweight: Tensor) -> None:
    if x.device != qweight.device:
        raise ValueError(f"input is on {x.device} but the layer is on {qweight.device}; move one of them")


def kernel_rows(x: Tensor) -> Tensor:
    """x [m, k] with contiguous rows that do not overlap, aligned (on CUDA to 16 bytes); a copy where a view has not."""
    row_stride, stride = x.stride()
    plain = stride == 1 and row_stride >= x.shape[1] and x.data_ptr() % (16 if x.is_cuda else x.element_size()) == 0
    if x.is_cuda and plain:
        plain = row_stride * x.element_size() % 16 == 0 or row_stride == x.shape[1]
    return x if plain else x.clone(memory_format=torch.contiguous_format)


# ---- registration ----------------------------------------------------------------------------------------------------

_library.impl("dequantize", _dequantize_reference, "CompositeExplicitAutograd")
_library.impl("linear", _linear_gemm, "CompositeExplicitAutograd")
for _device in ("CPU", "CUDA"):
    _library.impl("dequantize", _dequantize_native, _device)
    _library.impl("linear", _linear_native, _device)


@torch.library.register_fake("nf4linear::dequantize")
def _dequantize_fake(qweight, scales, nested_code, nested_absmax, nested_offset, format, n, k, blocksize, dtype):
    _check_dtype(dtype)
    return qweight.new_empty((n, k), dtype=dtype)


@torch.library.register_fake("nf4linear::linear")
def _linear_fake(
    x, qweight, scales, nested_code, nested_absmax, nested_offset, bias, format, n, k, blocksize, settled=False
):
    _check_input(x, bias, n, k)
    return x.new_empty((*x.shape[:-1], n))


def _save_weight(ctx, inputs, output):
    _, *weight, bias, format, n, k, blocksize, _ = inputs
    ctx.save_for_backward(*weight)
    ctx.spec = (format, n, k, blocksize)
    ctx.has_bias = bias is not None


def _linear_backward(ctx, grad):
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ dequantize(*ctx.saved_tensors, *ctx.spec, grad.dtype)
    if ctx.has_bias and ctx.needs_input_grad[6]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, None, None, None, None, None, grad_bias, None, None, None, None, None


torch.library.register_autograd("nf4linear::linear", _linear_backward, setup_context=_save_weight)

dequantize = torch.ops.nf4linear.dequantize
linear = torch.ops.nf4linear.linear

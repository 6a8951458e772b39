"""The operators nf4linear::dequantize and nf4linear::linear: schemas, checks, fakes, gradients.

Both take the packed tensors of one weight as plain arguments, so that torch.compile sees what they read:

    qweight, scales             packed codes and block (or row) scales, see formats.py
    nested_code, nested_absmax, nested_offset     second-level scales, all None without double quantization
    format, n, k, blocksize     the spec; blocksize is the group size of 8-bit formats, 0 for one scale a row

An implementation per device picks the native library where it has one and the torch reference elsewhere. The result
never depends on which was picked, up to the order of summation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference, reorder
from .formats import FourBitSpec, WeightSpec, make_spec

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_WEIGHT = "Tensor qweight, Tensor scales, Tensor? nested_code, Tensor? nested_absmax, Tensor? nested_offset"
_SPEC = "str format, int n, int k, int blocksize"
_library = torch.library.Library("nf4linear", "DEF")
_library.define(f"dequantize({_WEIGHT}, {_SPEC}, ScalarType dtype) -> Tensor")
_library.define(f"linear(Tensor x, {_WEIGHT}, Tensor? bias, {_SPEC}) -> Tensor")


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
    packed = packed_dict(spec, qweight, scales, nested_code, nested_absmax, nested_offset)
    return reference.dequantize(spec, reorder.unpack(spec, packed), dtype)


def _linear_reference(x, qweight, scales, nested_code, nested_absmax, nested_offset, bias, format, n, k, blocksize):
    _check_input(x, bias, n, k)
    weight = torch.ops.nf4linear.dequantize(
        qweight, scales, nested_code, nested_absmax, nested_offset, format, n, k, blocksize, x.dtype
    )
    return F.linear(x, weight, bias)


_library.impl("dequantize", _dequantize_reference, "CompositeExplicitAutograd")
_library.impl("linear", _linear_reference, "CompositeExplicitAutograd")


def _check_input(x: Tensor, bias: Tensor | None, n: int, k: int) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"input is {x.dtype}; nf4linear takes float32, float16 or bfloat16 activations")
    if x.shape[-1] != k:
        raise ValueError(f"input has {x.shape[-1]} features in its last dimension, the layer takes in_features={k}")
    if bias is not None and bias.dtype != x.dtype:
        raise TypeError(f"bias is {bias.dtype} but the input is {x.dtype}; cast one of them")


@torch.library.register_fake("nf4linear::dequantize")
def _dequantize_fake(qweight, scales, nested_code, nested_absmax, nested_offset, format, n, k, blocksize, dtype):
    return qweight.new_empty((n, k), dtype=dtype)


@torch.library.register_fake("nf4linear::linear")
def _linear_fake(x, qweight, scales, nested_code, nested_absmax, nested_offset, bias, format, n, k, blocksize):
    _check_input(x, bias, n, k)
    return x.new_empty((*x.shape[:-1], n))


def _save_weight(ctx, inputs, output):
    _, *weight, bias, format, n, k, blocksize = inputs
    ctx.save_for_backward(*weight)
    ctx.spec = (format, n, k, blocksize)
    ctx.has_bias = bias is not None


def _linear_backward(ctx, grad):
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ torch.ops.nf4linear.dequantize(*ctx.saved_tensors, *ctx.spec, grad.dtype)
    if ctx.has_bias and ctx.needs_input_grad[6]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, None, None, None, None, None, grad_bias, None, None, None, None


torch.library.register_autograd("nf4linear::linear", _linear_backward, setup_context=_save_weight)

dequantize = torch.ops.nf4linear.dequantize
linear = torch.ops.nf4linear.linear

"""First-use check of the fused CUDA kernels: for each GPU, dtype and width, a small linear against dequantize + GEMM.

A kernel that is wrong on some GPU, driver or build must cost speed there, not answers. The check runs once a process in
front of the first call that would use the kernels; where it fails, one warning says so and every later call of that
dtype and width on that GPU goes through dequantize + GEMM.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from . import native
from .formats import EightBitSpec, FourBitSpec, WeightSpec, dynamic_map

# Twice the relative error, in the Frobenius norm, that rounding the codebook and the output to the dtype gives.
TOLERANCES = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
# Ragged in rows and in inputs; few rows, whose inputs are cut into slices; and the least that the Hopper engine takes.
# One number of tokens for each kernel.
SPECS: dict[type, tuple[WeightSpec, ...]] = {
    FourBitSpec: (FourBitSpec("nf4", 200, 1088), FourBitSpec("nf4", 40, 4096), FourBitSpec("nf4", 1024, 4096)),
    EightBitSpec: (EightBitSpec("w8_s8", 200, 1088), EightBitSpec("w8_s8", 40, 4096, group_size=64)),
}
TOKENS = (1, 5, 12, 24, 48)
# The prefill engine for 4 bits takes large weights; of their rows the first ones are looked at, which saves memory.
PROMPT_SPECS = {FourBitSpec: FourBitSpec("nf4", 4096, 4096), EightBitSpec: EightBitSpec("w8_s8", 1000, 1088)}
PROMPT_TOKENS = 200
CHECKED_ROWS = 1024

_WIDTHS = {FourBitSpec: "4-bit", EightBitSpec: "8-bit"}
_verdicts: dict[tuple[int, torch.dtype, type], bool] = {}


def fused_allowed(library: native.CudaLibrary, device: int, dtype: torch.dtype, spec: WeightSpec) -> bool:
    """Whether calls of `dtype` on CUDA device `device` may use the fused kernels for weights like `spec`.

    The first call runs the check. False while the current stream captures a graph and nothing is known yet: checking
    would wait for the device.
    """
    kind = type(spec)
    verdict = _verdicts.get((device, dtype, kind))
    if verdict is None:
        if dtype not in TOLERANCES:
            verdict = False  # float32 has no fused kernel
        elif torch.cuda.is_current_stream_capturing():
            return False
        else:
            verdict = _check(library, device, dtype, kind)
        _verdicts[device, dtype, kind] = verdict
    return verdict


def _check(library: native.CudaLibrary, device: int, dtype: torch.dtype, kind: type) -> bool:
    with torch.no_grad(), torch.cuda.device(device):
        cases = [*((spec, tokens) for spec in SPECS[kind] for tokens in TOKENS), (PROMPT_SPECS[kind], PROMPT_TOKENS)]
        worst = max(_error(library, spec, device, dtype, tokens) for spec, tokens in cases)
    if worst <= TOLERANCES[dtype]:
        return True
    warnings.warn(
        f"nf4linear: the fused {_WIDTHS[kind]} kernels of {library.path} give wrong results on "
        f"{torch.cuda.get_device_name(device)} (cuda:{device}, {dtype}, relative error {worst:.1e}); "
        "dequantize + GEMM is used instead, which is slower. "
        "Please report this with the output of python -m torch.utils.collect_env.",
        stacklevel=2,
    )
    return False


def _error(library: native.CudaLibrary, spec: WeightSpec, device: int, dtype: torch.dtype, tokens: int) -> float:
    """Relative error of the fused product, 0 where this size has no fused kernel; infinite if it holds a NaN."""
    weight, tensors = _random_weight(spec, device)
    generator = torch.Generator(f"cuda:{device}").manual_seed(tokens)
    x = torch.randn(tokens, spec.k, device=f"cuda:{device}", generator=generator).to(dtype)
    got = torch.full((tokens, spec.n), torch.nan, device=x.device, dtype=dtype)
    if not library.linear(weight, x, None, got):
        return 0.0
    dense = torch.empty(spec.n, spec.k, device=x.device)
    library.dequantize(weight, dense)
    want = x.double() @ dense[:CHECKED_ROWS].double().T
    error = float((got[:, :CHECKED_ROWS].double() - want).norm() / want.norm())
    del tensors  # kept until here: the struct holds bare pointers
    return error if error == error else torch.inf


def _random_weight(spec: WeightSpec, device: int) -> tuple[native.Weight, list[Tensor]]:
    """A packed weight of random codes, and the tensors that its struct points to."""
    generator = torch.Generator(f"cuda:{device}").manual_seed(0)
    packed = spec.packed_tensors()
    where = {"device": f"cuda:{device}", "generator": generator}
    qweight = torch.randint(0, 256, packed["qweight"].shape, dtype=torch.uint8, **where)
    if isinstance(spec, EightBitSpec):
        scales = torch.rand(packed[spec.scales_name].shape, **where) + 0.5
        return native.describe_weight(spec, qweight, scales, None, None, None), [qweight, scales]
    scales = torch.randint(0, 256, packed["absmax_q"].shape, dtype=torch.uint8, **where)
    nested_code = torch.tensor(dynamic_map(), device=where["device"])
    nested_absmax = torch.rand(packed["nested_absmax"].shape, **where) * 0.01 + 0.01
    tensors = [qweight, scales, nested_code, nested_absmax, torch.full((), 0.05, device=where["device"])]
    return native.describe_weight(spec, *tensors), tensors

"""First-use check of the fused CUDA kernels: for each GPU, dtype and width, small products against dequantize + GEMM.

A kernel that is wrong on some GPU, driver or build must cost speed there, not answers. The check runs once a process in
front of the first call that would use the kernels; where it fails, one warning says so and every later call of that
dtype and width on that GPU goes through dequantize + GEMM.

It knows no kernel by name. It takes what the library's launch table picks for small weights, and then, by the tuning
flags, every shape that the library holds and the GPU can run, whatever size of weight the table keeps it for.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from . import native
from .formats import EightBitSpec, FourBitSpec, WeightSpec, dynamic_map, operands_of

# Twice the relative error, in the Frobenius norm, that rounding the codebook and the output to the dtype gives.
TOLERANCES = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
# Ragged in rows and in inputs, some with so few of these that a block can have them alone, and few rows with many
# inputs, which blocks share; between them every kind of scales and of codes.
SPECS: dict[type, tuple[WeightSpec, ...]] = {
    FourBitSpec: (
        FourBitSpec("nf4", 200, 1088),
        FourBitSpec("nf4", 40, 4096, blocksize=256),
        FourBitSpec("fp4", 136, 576, double_quant=False),
    ),
    EightBitSpec: (
        EightBitSpec("w8_s8", 200, 576),
        EightBitSpec("w8_u8", 40, 4096),
        EightBitSpec("w8_s8", 136, 640, group_size=128),
        EightBitSpec("w8_u8", 40, 4096, group_size=64),
    ),
}
# A kernel is tried with the first of these that it takes, which leaves few of its tokens empty, and nearly always some.
TOKENS = (340, 225, 168, 126, 94, 70, 52, 39, 29, 21, 15, 11, 8, 6, 4, 3, 2, 1)
# For the tuning flags (csrc/nf4linear.h). A number means something else to each engine: slices of the inputs, or fewest
# units of a block. With these and SPECS, blocks work alone and add up their sums in every way that their engine has
# (tests/test_*_plan.py); 5 is a meeting of two clusters to the prefill engine for 4-bit weights alone. The engines that
# know only 1, whole output tiles, from all others repeat themselves.
CUTS = (1, 2, 3, 4, 5)
# Far fewer tokens than the larger kernels have room for: they copy only those.
FEW = 43

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
        problem = _problem(library, torch.device("cuda", device), dtype, kind)
    if problem is None:
        return True
    warnings.warn(
        f"nf4linear: fused {_WIDTHS[kind]} kernels of {library.path} {problem} on "
        f"{torch.cuda.get_device_name(device)} (cuda:{device}, {dtype}); "
        "dequantize + GEMM is used instead, which is slower. "
        "Please report this with the output of python -m torch.utils.collect_env.",
        stacklevel=2,
    )
    return False


def _problem(library: native.CudaLibrary, device: torch.device, dtype: torch.dtype, kind: type) -> str | None:
    try:
        errors = [error for spec in SPECS[kind] for error in Product(library, spec, device, dtype).errors()]
    except native.NativeError as error:
        return f"cannot be launched ({error})"
    worst = float(torch.stack(errors).max()) if errors else 0.0  # NaN if one of them is
    return None if worst <= TOLERANCES[dtype] else f"give wrong results (relative error {worst:.1e})"


class Product:
    """Activations times one random weight: exact, and by the fused kernels."""

    def __init__(self, library: native.CudaLibrary, spec: WeightSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._library = library
        generator = torch.Generator(device).manual_seed(0)
        self._tensors = _random_weight(spec, generator)  # kept: the struct holds bare pointers
        self._weight = native.describe_weight(spec, *self._tensors)
        x = torch.randn(TOKENS[0], spec.k, dtype=torch.float32, device=device, generator=generator)
        self._x = x.to(dtype)
        dense = torch.empty(spec.n, spec.k, dtype=torch.float32, device=device)
        library.dequantize(self._weight, dense)
        self._exact = self._x.double() @ dense.double().T

    def errors(self) -> list[Tensor]:
        """Relative errors of all kernels that take it, each in the Frobenius norm and still on the device."""
        found = [self._error(tokens) for tokens in TOKENS]
        for shape in range(native.TUNE_SHAPES):
            whole = native.tuned(shape, CUTS[0])
            if self.multiply(1, whole) is None:
                continue  # there is none of this number, or it cannot run on this GPU
            tokens = next(t for t in TOKENS if self.multiply(t, whole) is not None)
            found += [self._error(tokens, native.tuned(shape, cut)) for cut in CUTS]
            if tokens > 2 * FEW:
                found.append(self._error(FEW, whole))
        return [error for error in found if error is not None]

    def multiply(self, tokens: int, flags: int = 0) -> Tensor | None:
        """None where no fused kernel takes so many tokens; NaN wherever the kernel wrote nothing."""
        got = self._x.new_full((tokens, self._exact.shape[1]), torch.nan)
        return got if self._library.linear(self._weight, self._x[:tokens], None, got, flags) else None

    def _error(self, tokens: int, flags: int = 0) -> Tensor | None:
        got = self.multiply(tokens, flags)
        want = self._exact[:tokens]
        return None if got is None else (got - want).norm() / want.norm()


def _random_weight(spec: WeightSpec, generator: torch.Generator) -> tuple[Tensor | None, ...]:
    """The weight arguments of random codes and scales."""
    where = {"device": generator.device, "generator": generator}
    tensors = []
    for name, dtype, shape in operands_of(spec):
        if name == "nested_code":
            tensors.append(torch.tensor(dynamic_map(), dtype=dtype, device=generator.device))
        elif name == "nested_offset":
            tensors.append(torch.full((), 0.05, dtype=dtype, device=generator.device))
        elif dtype is torch.uint8:
            tensors.append(torch.randint(0, 256, shape, dtype=dtype, **where))
        elif name == "nested_absmax":
            tensors.append(torch.rand(shape, dtype=dtype, **where) * 0.01 + 0.01)
        else:
            tensors.append(torch.rand(shape, dtype=dtype, **where) + 0.5)
    return *tensors, *[None] * (5 - len(tensors))

"""What tests of fused kernels share: how they are launched, the weights they see, and how errors are measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nf4linear import native, reference, reorder
from nf4linear.formats import FORMATS, FourBitSpec, WeightSpec
from operands import fresh_weight, operands

DTYPES = [torch.float16, torch.bfloat16]
# Relative error that rounding the output alone can give: half a unit of the last place. Over many values it is less
# than half of that.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
PLAIN, DEPENDENT = 0, native.DEPENDENT_LAUNCH
# Weights for both prefill engines.
PREFILL_SPECS = (
    FourBitSpec("nf4", 48, 192),
    FourBitSpec("nf4", 1000, 576),  # ragged rows, odd number of k tiles
    FourBitSpec("nf4", 33, 1088),
    FourBitSpec("nf4", 5, 64),  # rows of y that start anywhere
    FourBitSpec("nf4", 336, 4096),  # odd number of row tiles
    FourBitSpec("fp4", 200, 640),
    FourBitSpec("nf4", 272, 1024, blocksize=128),
    FourBitSpec("fp4", 96, 4096, blocksize=4096),
    FourBitSpec("nf4", 130, 704, double_quant=False),
    FourBitSpec("fp4", 48, 2048, blocksize=512, double_quant=False),
)


def launch(
    library: native.CudaLibrary,
    spec: WeightSpec,
    packed: dict[str, Tensor],
    x: Tensor,
    flags: int = 0,
    bias: Tensor | None = None,
) -> Tensor | None:
    """The fused product into poisoned memory; None where the library leaves the call to a GEMM."""
    y = torch.full((x.shape[0], spec.n), torch.nan, device=x.device, dtype=x.dtype)
    return y if library.linear(native.describe_weight(spec, *operands(spec, packed)), x, bias, y, flags) else None


def on_hopper(library: native.CudaLibrary) -> bool:
    """Whether the kernels that are Hopper's alone can run."""
    return torch.cuda.get_device_capability() == (9, 0) and "90a" in library.architectures


def written_alone(write: Callable[[Tensor], bool], shape: tuple[int, int], shift: int) -> Tensor:
    """What write(y) makes of y, NaN before, `shift` elements off in a buffer whose other elements must stay."""
    size = shape[0] * shape[1]
    buffer = torch.full((size + 128,), 12345.0, device="cuda", dtype=torch.bfloat16)
    sentinel = buffer[0].item()
    y = buffer[64 + shift : 64 + shift + size].view(shape)
    y.fill_(torch.nan)
    assert write(y)
    outside = torch.cat((buffer[: 64 + shift], buffer[64 + shift + size :]))
    assert (outside == sentinel).all(), shift
    return y


def any_weight(spec: WeightSpec) -> tuple[WeightSpec, dict[str, Tensor], dict[str, Tensor]]:
    """The spec, canonical and packed tensors of a quantized weight, another one each time."""
    canonical = fresh_weight(spec, seed=torch.randint(2**31, ()).item(), device="cuda")
    return spec, canonical, reorder.pack(spec, canonical)


def random_weight(spec: FourBitSpec) -> dict[str, Tensor]:
    """Packed tensors of random bytes, made on the GPU; nothing but the size is of interest."""
    generator = torch.Generator("cuda").manual_seed(0)
    packed = {}
    for name, tensor in spec.packed_tensors().items():
        where = {"device": "cuda", "generator": generator}
        if tensor.dtype == torch.uint8:
            packed[name] = torch.randint(0, 256, tensor.shape, dtype=torch.uint8, **where)
        else:
            packed[name] = torch.rand(tensor.shape, **where) + 0.1
    return packed | {"code": torch.tensor(FORMATS[spec.format].code, device="cuda")}


def rounded_centroids(spec: FourBitSpec, canonical: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight as kernels for few tokens see it, float32: centroids rounded to `dtype`, scales exact."""
    codes = canonical["codes"]
    nibbles = torch.stack((codes >> 4, codes & 15), 1).view(-1).long()
    table = torch.tensor(FORMATS[spec.format].code, device=codes.device).to(dtype).float()
    scales = reference.block_scales(spec, canonical).repeat_interleave(spec.blocksize)
    return (table[nibbles] * scales).view(spec.n, spec.k)


def relative_error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def capture(calls: list[Callable[[], Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    return graph, outputs

"""humming as a peer of linear layers, where it is installed: its layers, and its kernels compiled ahead."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..formats import WeightSpec
from .gpu import Contender, copies_of


class PeerWeight(Protocol):
    """What a weight of the benchmark tells humming: its shape, its values, and the nearest format that humming has."""

    spec: WeightSpec
    humming_config: ClassVar[dict[str, Any]]
    humming_bytes: ClassVar[float]  # of a weight

    def dense(self, dtype: torch.dtype) -> Tensor: ...


def installed() -> bool:
    return importlib.util.find_spec("humming") is not None


def peer(weight: PeerWeight, dtype: torch.dtype) -> Iterator[Contender]:
    """Layers of humming's nearest format on the dequantized weight, which is not quite ours."""
    if not installed():
        return
    nbytes = weight.spec.n * weight.spec.k * weight.humming_bytes
    dense = weight.dense(dtype)
    layers = [_layer(dense, weight.humming_config) for _ in range(copies_of(int(nbytes)))]
    yield Contender("humming", layers, nbytes, comparable=False)


def compile_ahead(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, config: dict[str, Any]
) -> None:
    """Calls every shape once with every number of tokens, side by side.

    humming compiles at a first call, for seconds and in a process of its own, and keeps on disk what it has compiled;
    so threads that wait for those processes are all that is needed.
    """
    if not installed():
        return

    def layer(shape: tuple[int, int]):
        return _layer(torch.randn(shape, device="cuda", dtype=dtype), config)

    @torch.inference_mode()
    def call(job: tuple[Any, int, int]) -> None:
        layer, k, m = job
        layer(torch.zeros(m, k, device="cuda", dtype=dtype))

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        layers = list(threads.map(layer, shapes))
        jobs = [(layer, k, m) for layer, (_, k) in zip(layers, shapes, strict=True) for m in tokens]
        list(threads.map(call, jobs))
    torch.cuda.synchronize()


def _layer(dense: Tensor, config: dict[str, Any]):
    from humming.layer import HummingLayer

    n, k = dense.shape
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(config), torch_dtype=dense.dtype).cuda()
    layer.load_from_unquantized(dense)
    layer.transform()
    return layer

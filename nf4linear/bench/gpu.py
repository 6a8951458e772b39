"""How GPU benchmarks time, what the GPU can do at best, and the head of a result file.

Protocol "cold-graph": one CUDA graph walks over copies of a layer that together exceed the L2 cache four times, so
every call reads its weight from memory and the host is out of the way. Contenders take turns replaying, and a time is
the median over rounds.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .record import Row, commit, first_line_of, versions

Call = Callable[[], Any]
Layer = Callable[[Tensor], Tensor]

PEERS = ("torch", "bitsandbytes", "humming-kernels", "transformers")
MOST_COPIES = 64


@dataclass
class Contender:
    """One implementation of a layer: `layers` are the same weight at different addresses."""

    impl: str
    layers: Sequence[Layer]
    nbytes: float  # of one weight
    launch: str = "plain"
    comparable: bool = True  # it multiplies by our weight, so its error means something
    takes: torch.dtype | None = None  # activations of this type alone, which it is given then

    @property
    def name(self) -> str:
        return f"{self.impl} {self.launch}"


def copies_of(nbytes: int) -> int:
    """Copies of a layer of `nbytes` that together exceed the L2 cache four times."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MOST_COPIES, 4 * l2 // nbytes + 1))


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph of all calls; two of them run first, outside, for whatever happens only once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def race(contenders: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, float]:
    """Median microseconds of one call of each contender; they replay in turns, each round from another one on."""
    graphs = {name: capture(calls) for name, calls in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds + 1):  # the first round warms up
        for name in itertools.islice(itertools.cycle(names), turn % len(names), turn % len(names) + len(names)):
            us = _replay_us(graphs[name]) / len(contenders[name])
            if turn:
                times[name].append(us)
    return {name: statistics.median(us) for name, us in times.items()}


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def measure_ceilings() -> dict[str, float]:
    """What this GPU reaches: GB/s of a sum over 2 GiB, GB/s read + written of a copy, dense bf16 TFLOP/s of torch."""
    source = torch.zeros(1 << 29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source[: 1 << 28])
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls = {
        "read": [lambda: source.sum()] * 2,
        "copy": [lambda: target.copy_(source[: target.numel()])] * 2,
        "gemm": [lambda: a @ b] * 2,
    }
    us = race(calls, rounds=7)
    return {
        "read_GBps": source.nbytes / us["read"] / 1e3,
        "copy_GBps": 2 * target.nbytes / us["copy"] / 1e3,
        "bf16_TFLOPs": 2 * 8192**3 / us["gemm"] / 1e6,
    }


def machine_slug() -> str:
    """Name of the GPU for file names, such as "h200"."""
    name = torch.cuda.get_device_name(0).lower()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"nvidia|geforce|tesla", "", name)).strip("-")


def record_of(rows: Sequence[Row], ceilings: Mapping[str, float]) -> Row:
    """The whole result file: where, when, with what, and the rows."""
    return {
        "machine": torch.cuda.get_device_name(0),
        "driver": first_line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions(PEERS)},
        "command": shlex.join(["nf4linear", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "ceilings": dict(ceilings),
        "rows": list(rows),
    }

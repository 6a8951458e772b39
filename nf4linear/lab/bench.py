"""Times of every stage and of bitsandbytes, by the same two protocols.

idle-events   the device is idle before each launch; events around it; inputs stay in the cache (the published protocol)
cold-graph    one CUDA graph walks over copies of the weight that together exceed the L2 cache four times
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import program, weight_file
from .generate import DTYPES, Case

PROTOCOLS = {"idle": "idle-events", "cold": "cold-graph"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Repeats:
    warmup: int = 20
    repeats: int = 100


def copy_ceiling() -> float:
    """Read + write rate of a 1 GiB device copy, in GB/s: the roof of every kernel here."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    ms = statistics.median(_idle_times(lambda: target.copy_(source), Repeats(3, 20)))
    return 2 * source.numel() / ms / 1e6


def stage_rows(
    case: Case, folder: Path, stages: Sequence[str], dtypes: Sequence[str], repeats: Repeats, ceiling: float
) -> list[Row]:
    """Stages through the C++ program, by both protocols."""
    times = program.run_stages(
        program.find(folder), case.weight_path(folder), stages, dtypes,
        warmup=repeats.warmup, repeats=repeats.repeats, protocols=tuple(PROTOCOLS),
    )  # fmt: skip
    return [_row(case, each.stage, each.dtype, each.protocol, asdict(each), ceiling) for each in times]


def bitsandbytes_rows(case: Case, folder: Path, dtypes: Sequence[str], repeats: Repeats, ceiling: float) -> list[Row]:
    """bitsandbytes' dequantize_4bit of the same file, as Python calls it, by both protocols."""
    lab = weight_file.read(case.weight_path(folder))
    payload = case.weight_path(folder).stat().st_size - weight_file.HEADER.size
    rows = []
    for dtype in dtypes:
        call = _BitsandbytesCall(lab, DTYPES[dtype])
        for protocol, measure in (("idle", _idle_times), ("cold", _cold_times)):
            ms = measure(call, repeats)
            times = {
                "repeats": len(ms),
                "bytes": payload + case.rows * case.columns * DTYPES[dtype].itemsize,
                "mean_ms": statistics.fmean(ms),
                "median_ms": statistics.median(ms),
                "min_ms": min(ms),
                "max_ms": max(ms),
            }
            rows.append(_row(case, "bitsandbytes", dtype, protocol, times, ceiling))
    return rows


def _row(case: Case, impl: str, dtype: str, protocol: str, times: Row, ceiling: float) -> Row:
    return {
        "op": "dequant",
        "impl": impl,
        "format": "nf4-dq",
        "n": case.rows,
        "k": case.columns,
        "blocksize": case.blocksize,
        "tables": case.tables,
        "dtype": dtype,
        "protocol": PROTOCOLS[protocol],
        "repeats": times["repeats"],
        "us": times["median_ms"] * 1e3,
        "mean_us": times["mean_ms"] * 1e3,
        "min_us": times["min_ms"] * 1e3,
        "max_us": times["max_ms"] * 1e3,
        "gb_per_s": times["bytes"] / times["median_ms"] / 1e6,
        "roof_us": times["bytes"] / ceiling / 1e3,
    }


class _BitsandbytesCall:
    """dequantize_4bit of one weight on the GPU; `clone` gives the same call on other memory."""

    def __init__(self, lab: weight_file.LabWeight, dtype: torch.dtype) -> None:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        t = {name: tensor.cuda() for name, tensor in lab.canonical.items()}
        second = QuantState(t["nested_absmax"], code=t["nested_code"], blocksize=256, dtype=torch.float32)
        self._state = QuantState(
            t["absmax"], torch.Size((lab.spec.n, lab.spec.k)), t["code"], lab.spec.blocksize, "nf4", dtype,
            t["nested_offset"], second,
        )  # fmt: skip
        self._codes = t["codes"].view(-1, 1)
        self._dequantize = dequantize_4bit

    def clone(self) -> _BitsandbytesCall:
        other = copy.copy(self)
        other._codes, other._state = self._codes.clone(), copy.copy(self._state)
        other._state.absmax = self._state.absmax.clone()
        return other

    def input_bytes(self) -> int:
        return self._codes.numel() + self._state.absmax.numel()

    def __call__(self) -> None:
        self._dequantize(self._codes, self._state)


def _idle_times(call: Callable[[], Any], repeats: Repeats) -> list[float]:
    for _ in range(repeats.warmup):
        call()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(repeats.repeats):
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return times


def _cold_times(call: _BitsandbytesCall, repeats: Repeats) -> list[float]:
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, min(64, 4 * l2_bytes // call.input_bytes() + 1))
    calls = [call, *(call.clone() for _ in range(count - 1))]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in calls:
            each()
    times = _idle_times(graph.replay, Repeats(1, max(5, -(-repeats.repeats // count))))
    return [ms / count for ms in times]

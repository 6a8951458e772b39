"""Linear layers on this machine's CPU: ours beside torch and bitsandbytes, in paired runs.

Protocol "paired": every implementation holds several copies of its weight, together larger than three last-level
caches, and each call takes the next copy, as a model's layers do. A round gives every implementation one turn, in
random order, beside one read of plain memory; a turn is one call to wake its threads and up to three timed ones. Times
are medians over rounds, and a speed-up is the median of the rounds' ratios. So what else the machine does meanwhile
falls on all of them alike.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import native, reference
from ..formats import EightBitSpec, FourBitSpec
from ..linear import NF4Linear, PackedLinear, W8Linear
from .record import Row, commit, versions

SHAPES = ((4096, 4096), (11008, 4096))
ROWS = (1, 4, 16, 128, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp32-medium": torch.float32}
MEDIUM = "fp32-medium"  # float32 activations where the user lets torch multiply them in bfloat16
PEERS = ("torch", "transformers", "bitsandbytes")
READ_BYTES = 256 << 20

Call = Callable[[Tensor], Tensor]


@dataclass
class Implementation:
    """`calls` are the same layer on as many copies of its weight; `nbytes` is the size of one."""

    name: str
    dtype: str  # of the activations, a key of DTYPES
    nbytes: int
    calls: Sequence[Call]
    used: int = 0

    def _next(self) -> Call:
        self.used += 1
        return self.calls[self.used % len(self.calls)]

    def result(self, x: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("medium" if self.dtype == MEDIUM else "highest")
        return self._next()(x)

    def turn(self, x: Tensor, timed: int) -> float:
        """Seconds a call: the mean of `timed` calls after one that is not counted."""
        self.result(x)
        calls = [self._next() for _ in range(timed)]
        start = time.perf_counter()
        for call in calls:
            call(x)
        return (time.perf_counter() - start) / timed


def copies_of(nbytes: int) -> int:
    return max(2, -(-3 * last_level_cache() // nbytes))


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB where the system does not say."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes), default=32 << 20)


def copied_layers(layer: nn.Module, nbytes: int) -> list[nn.Module]:
    return [layer, *(copy.deepcopy(layer) for _ in range(copies_of(nbytes) - 1))]


def packed_bytes(layer: PackedLinear) -> int:
    return sum(spec.nbytes() for spec in layer.spec.packed_tensors().values())


def nf4_implementations(weight: Tensor) -> tuple[list[Implementation], Tensor]:
    """Everything that runs an NF4 layer (and the 16- and 32-bit one) of `weight`, and the exact float32 weight."""
    import bitsandbytes as bnb

    n, k = weight.shape
    spec = FourBitSpec("nf4", n, k)
    canonical = reference.quantize(spec, weight)
    exact = reference.dequantize(spec, canonical, torch.float32)
    found = []
    for dtype_name in ("bf16", "fp32"):
        dtype = DTYPES[dtype_name]
        plain = exact.to(dtype)
        plains = [plain, *(plain.clone() for _ in range(copies_of(plain.nbytes) - 1))]
        calls = [lambda x, w=w: F.linear(x, w) for w in plains]
        found.append(Implementation("torch", dtype_name, plain.nbytes, calls))

        ours = NF4Linear.from_linear(_plain_linear(weight))
        nbytes = packed_bytes(ours)
        layers = copied_layers(ours, nbytes)
        found.append(Implementation("nf4linear", dtype_name, nbytes, layers))
        dequantized = [lambda x, layer=layer: F.linear(x, layer.dequantize(x.dtype)) for layer in layers]
        found.append(Implementation("dequant_gemm", dtype_name, nbytes, dequantized))

        theirs = bnb.nn.Linear4bit(k, n, bias=False, quant_type="nf4", compress_statistics=True, compute_dtype=dtype)
        theirs.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
        theirs = theirs.to("cpu")
        layers = copied_layers(theirs.train(), nbytes)  # in training mode weights stay in the file's order
        found.append(Implementation("bitsandbytes", dtype_name, nbytes, layers))
        # The first forward in evaluation mode repacks the weight for AVX512-BF16, where the processor has it.
        repacked = [layer.eval() for layer in copied_layers(copy.deepcopy(theirs), nbytes)]
        for layer in repacked:
            layer(torch.zeros(1, k, dtype=dtype))
        if getattr(repacked[0].weight.quant_state, "packing_format_for_cpu", False):
            found.append(Implementation("bitsandbytes_repacked", dtype_name, nbytes, repacked))
    # torch's switch changes what these do, but for bitsandbytes' repacked layer, which is in bfloat16 anyway.
    medium = [dataclasses.replace(each, dtype=MEDIUM) for each in found if each.dtype == "fp32"]
    found += [each for each in medium if each.name in ("nf4linear", "torch", "bitsandbytes_repacked")]
    return found, exact


def w8_implementations(weight: Tensor) -> tuple[list[Implementation], Tensor]:
    """8 bit with one scale a row: ours, torch's 16-bit layer, bitsandbytes' LLM.int8() layer without outliers."""
    import bitsandbytes as bnb

    n, k = weight.shape
    spec = EightBitSpec("w8_s8", n, k)
    exact = reference.dequantize(spec, reference.quantize(spec, weight), torch.float32)
    plain = exact.bfloat16()
    plains = [plain, *(plain.clone() for _ in range(copies_of(plain.nbytes) - 1))]
    ours = W8Linear.from_linear(_plain_linear(weight))
    nbytes = packed_bytes(ours)
    theirs = bnb.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False, threshold=0.0)
    theirs.weight = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    theirs = theirs.to("cpu").eval()
    theirs(torch.zeros(1, k, dtype=torch.bfloat16))
    found = [
        Implementation("torch", "bf16", plain.nbytes, [lambda x, w=w: F.linear(x, w) for w in plains]),
        Implementation("nf4linear", "bf16", nbytes, copied_layers(ours, nbytes)),
        Implementation("bitsandbytes", "bf16", nbytes, copied_layers(theirs, nbytes)),
    ]
    return found, exact


def _plain_linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class Memory:
    """Plain memory, read from end to end: the ceiling of a layer whose weights are read once."""

    def __init__(self) -> None:
        self._data = torch.ones(READ_BYTES // 4)

    def rate(self) -> float:
        """GB/s of one pass."""
        start = time.perf_counter()
        self._data.sum()
        return READ_BYTES / (time.perf_counter() - start) / 1e9


def measure(found: list[Implementation], exact: Tensor, m: int, memory: Memory, seconds: float) -> list[Row]:
    """One row an implementation for `m` rows of x, from as many rounds as fit in `seconds` (7 at least).

    Leaves torch's precision of float32 products as the last implementation had it.
    """
    n, k = exact.shape
    generator = torch.Generator().manual_seed(m)
    inputs = {name: torch.randn(m, k, generator=generator).to(dtype) for name, dtype in DTYPES.items()}
    wanted = {name: x.double() @ exact.double().T for name, x in inputs.items()}
    errors = {id(each): _error(each.result(inputs[each.dtype]), wanted[each.dtype]) for each in found}
    times: dict[int, list[float]] = {id(each): [] for each in found}
    rates = []
    end = time.monotonic() + seconds
    order = list(found)
    while len(rates) < 7 or (time.monotonic() < end and len(rates) < 200):
        random.shuffle(order)
        rates.append(memory.rate())
        for each in order:
            times[id(each)].append(each.turn(inputs[each.dtype], 3 if m <= 16 else 1))
    ours = {each.dtype: times[id(each)] for each in found if each.name == "nf4linear"}
    return [
        {
            "impl": each.name,
            "dtype": each.dtype,
            "n": n,
            "k": k,
            "m": m,
            "protocol": "paired",
            "rounds": len(rates),
            "us": statistics.median(times[id(each)]) * 1e6,
            "min_us": min(times[id(each)]) * 1e6,
            "ours_faster": statistics.median(b / a for a, b in zip(ours[each.dtype], times[id(each)], strict=True)),
            "weight_GBps": each.nbytes / statistics.median(times[id(each)]) / 1e9,
            "read_share": statistics.median(
                each.nbytes / t / 1e9 / rate for t, rate in zip(times[id(each)], rates, strict=True)
            ),
            "roof_us": each.nbytes / statistics.median(rates) / 1e3,
            "rel_err": errors[id(each)],
        }
        for each in found
    ]


def _error(y: Tensor, wanted: Tensor) -> float:
    return ((y.double() - wanted).norm() / wanted.norm()).item()


def sweep(shapes: Sequence[tuple[int, int]], rows: Sequence[int], seconds: float) -> Iterator[list[Row]]:
    """The rows of one shape, width and number of rows of x after the other; `seconds` a cell, at least."""
    memory = Memory()
    for n, k in shapes:
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02
        for op, label, make in (
            ("linear", "nf4-dq", nf4_implementations),
            ("linear_w8", "w8-s8", w8_implementations),
        ):
            found, exact = make(weight)
            for m in rows:
                fresh = measure(found, exact, m, memory, seconds)
                yield [{"op": op, "format": label, "launch": "plain", **row} for row in fresh]


def read_rate() -> float:
    """The best rate at which memory was read, GB/s."""
    memory = Memory()
    return max(memory.rate() for _ in range(20))


def describe_machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    name = named.get("model name", "unknown CPU")
    return f"{name}, family {named.get('cpu family')} model {named.get('model')}, {torch.get_num_threads()} threads"


def record_of(rows: Sequence[Row], command: str, **more: object) -> Row:
    """The whole result file: where, when, with what, how busy the machine was, and the rows."""
    return {
        "machine": describe_machine(),
        "driver": native.library("cpu").description,
        "versions": versions(PEERS),
        "command": command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "load": os.getloadavg()[1],
        **more,
        "rows": list(rows),
    }

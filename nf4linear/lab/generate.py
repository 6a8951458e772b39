"""Random weights, quantized by bitsandbytes, as a laboratory file beside the output that every stage must give."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import reference
from ..formats import FourBitSpec
from . import weight_file

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One experiment: a weight [rows, columns] and the type of the tables in its file."""

    rows: int = 4096
    columns: int = 4096
    blocksize: int = 64
    tables: str = "fp32"
    seed: int = 0

    @property
    def name(self) -> str:
        return f"nf4-{self.rows}x{self.columns}-b{self.blocksize}-{self.tables}"

    def weight_path(self, folder: Path) -> Path:
        return folder / f"{self.name}.bin"

    def reference_path(self, folder: Path, dtype: str) -> Path:
        return folder / f"{self.name}-reference-{dtype}.raw"


def generate(case: Case, folder: Path, dtypes: tuple[str, ...]) -> dict[str, str]:
    """Write the weight file and the reference output in each of `dtypes`; returns who quantized and who dequantized.

    With a GPU and float32 tables both are bitsandbytes itself; on the CPU, where its kernels round otherwise, and for
    float16 tables, which it does not know, the reference is nf4linear.reference on the same bytes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = FourBitSpec("nf4", case.rows, case.columns, case.blocksize)
    generator = torch.Generator(device).manual_seed(case.seed)
    weight = torch.randn(case.rows, case.columns, generator=generator, device=device)
    canonical, quantized_by, dequantize = _quantize(spec, weight)
    lab = weight_file.with_tables(spec, canonical, case.tables)
    weight_file.write(case.weight_path(folder), lab)
    exact = dequantize is not None and case.tables == "fp32"
    for dtype in dtypes:
        wanted = dequantize(DTYPES[dtype]) if exact else reference.dequantize(spec, lab.canonical, DTYPES[dtype])
        _write_raw(case.reference_path(folder, dtype), wanted)
    provenance = {"quantized_by": quantized_by, "reference_by": quantized_by if exact else "nf4linear.reference"}
    provenance["reference_device"] = device if exact else "cpu"
    case.weight_path(folder).with_suffix(".json").write_text(json.dumps(asdict(case) | provenance, indent=2) + "\n")
    return provenance


def read_raw(path: Path, case: Case, dtype: str) -> Tensor:
    """A [rows, columns] matrix that this module or the C++ program wrote. Raises ValueError when its size is wrong."""
    values = torch.frombuffer(bytearray(path.read_bytes()), dtype=DTYPES[dtype])
    if values.numel() != case.rows * case.columns:
        raise ValueError(f"{path} holds {values.numel()} values, expected {case.rows} x {case.columns}")
    return values.view(case.rows, case.columns)


def _write_raw(path: Path, matrix: Tensor) -> None:
    path.write_bytes(matrix.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _quantize(spec: FourBitSpec, weight: Tensor):
    """(canonical tensors, who made them, bitsandbytes' dequantize where it is exact or None)."""
    try:
        import bitsandbytes
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError:
        return reference.quantize(spec, weight), "nf4linear.reference", None
    codes, state = quantize_4bit(weight, blocksize=spec.blocksize, compress_statistics=True, quant_type="nf4")
    canonical = {
        "codes": codes.view(-1),
        "absmax": state.absmax,
        "code": state.code.float(),
        "nested_absmax": state.state2.absmax,
        "nested_code": state.state2.code,
        "nested_offset": state.offset.float().reshape(()),
    }

    def dequantize(dtype: torch.dtype) -> Tensor:
        state.dtype = dtype
        return dequantize_4bit(codes, state)

    return canonical, f"bitsandbytes {bitsandbytes.__version__}", dequantize if weight.is_cuda else None

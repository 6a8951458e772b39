"""The laboratory's binary file: one NF4 weight with double quantization. Layout: csrc/lab/weight_file.h.

Version 1 is a 64-byte little-endian header (magic, version, table type, rows, columns, blocksize, nested blocksize,
offset, CRC-32 of the whole file with this field as 0, size of the rest, 0), then codes, absmax_q, absmax2 and code2
without gaps.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..formats import NESTED_BLOCKSIZE, NF4, FourBitSpec, check_tensors

MAGIC = b"NF4LAB\r\n"
VERSION = 1
HEADER = struct.Struct("<8sIIQQIIfIQQ")
TABLE_TYPES = {"fp32": torch.float32, "fp16": torch.float16}  # in the order of their codes 0, 1
CODE2_SIZE = 256
CHECKSUM = slice(44, 48)  # of the header


class DamagedFileError(ValueError):
    """A file that is not a whole, valid laboratory file; the text says what is wrong."""


@dataclass(frozen=True)
class LabWeight:
    """One NF4 weight: `canonical` holds the tensors of `spec.canonical_tensors()` on the CPU, tables as float32.

    `tables` is the type ("fp32" or "fp16") in which absmax2 and code2 travel in the file; with "fp16" the canonical
    tables are the float32 values of the rounded ones, so that every reader computes the same weight.
    """

    spec: FourBitSpec
    canonical: dict[str, Tensor]
    tables: str = "fp32"


def with_tables(spec: FourBitSpec, canonical: dict[str, Tensor], tables: str) -> LabWeight:
    """A LabWeight whose second-level tables are rounded to `tables`. Raises ValueError for an unknown type."""
    if tables not in TABLE_TYPES:
        raise ValueError(f"tables must be one of {', '.join(TABLE_TYPES)}; got {tables!r}")
    check_tensors(canonical, spec.canonical_tensors(), "laboratory weight")
    canonical = {name: tensor.cpu() for name, tensor in canonical.items()}
    for name in ("nested_code", "nested_absmax"):
        canonical[name] = canonical[name].to(TABLE_TYPES[tables]).float()
    return LabWeight(spec, canonical, tables)


def write(path: Path, weight: LabWeight) -> None:
    """Write the file; under a temporary name first, so that a reader never sees half of it.

    Raises ValueError for an offset that is not finite, which no reader takes.
    """
    spec, t, table_type = weight.spec, weight.canonical, TABLE_TYPES[weight.tables]
    sections = (t["codes"], t["absmax"], t["nested_absmax"].to(table_type), t["nested_code"].to(table_type))
    payload = b"".join(section.contiguous().view(torch.uint8).numpy().tobytes() for section in sections)
    code, offset = list(TABLE_TYPES).index(weight.tables), t["nested_offset"].item()
    if not math.isfinite(offset):
        raise ValueError(f"{path}: the weight's nested_offset is {offset}, expected a finite number")
    header = HEADER.pack(
        MAGIC, VERSION, code, spec.n, spec.k, spec.blocksize, NESTED_BLOCKSIZE, offset, 0, len(payload), 0
    )
    data = bytearray(header + payload)
    data[CHECKSUM] = _checksum(data).to_bytes(4, "little")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(data)
    temporary.replace(path)


def read(path: Path) -> LabWeight:
    """Read and check a file. Raises DamagedFileError naming the file and what is wrong with it."""
    try:
        return _parse(path.read_bytes())
    except DamagedFileError as error:
        raise DamagedFileError(f"{path}: {error}") from None


def _parse(data: bytes) -> LabWeight:
    if len(data) < HEADER.size:
        raise DamagedFileError(f"the file ends inside the {HEADER.size}-byte header")
    magic, version, code, rows, columns, blocksize, nested, offset, crc, size, reserved = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedFileError("wrong magic: not an nf4linear lab file")
    if version != VERSION:
        raise DamagedFileError(f"version is {version}, this program reads version {VERSION}")
    if code >= len(TABLE_TYPES):
        raise DamagedFileError(f"table type is {code}, expected 0 (float32) or 1 (float16)")
    if nested != NESTED_BLOCKSIZE or reserved != 0:
        raise DamagedFileError(f"nested blocksize is {nested} and the reserved field {reserved}, expected 256 and 0")
    try:
        spec = FourBitSpec("nf4", rows, columns, blocksize)
    except ValueError as error:
        raise DamagedFileError(str(error)) from None
    if not math.isfinite(offset):
        raise DamagedFileError(f"the offset is {offset}, expected a finite number")
    tables = list(TABLE_TYPES)[code]
    item = TABLE_TYPES[tables].itemsize
    sizes = [-(-rows * columns // 2), spec.blocks, spec.nested_groups * item, CODE2_SIZE * item]
    if size != sum(sizes) or len(data) != HEADER.size + size:
        raise DamagedFileError(
            f"the header says {size} bytes of data and the file has {len(data) - HEADER.size}; "
            f"{rows} x {columns} with blocksize {blocksize} takes {sum(sizes)}"
        )
    if _checksum(data) != crc:
        raise DamagedFileError("checksum mismatch: the file is damaged; write it again with `nf4linear lab generate`")
    codes, absmax, absmax2, code2 = _sections(data, sizes)
    return LabWeight(
        spec,
        {
            "codes": codes,
            "absmax": absmax,
            "code": torch.tensor(NF4.code, dtype=torch.float32),
            "nested_absmax": absmax2.view(TABLE_TYPES[tables]).float(),
            "nested_code": code2.view(TABLE_TYPES[tables]).float(),
            "nested_offset": torch.tensor(offset, dtype=torch.float32),
        },
        tables,
    )


def _checksum(data: bytes | bytearray) -> int:
    """CRC-32 of a whole file with its own field taken as 0."""
    header = bytearray(data[: HEADER.size])
    header[CHECKSUM] = bytes(4)
    return zlib.crc32(memoryview(data)[HEADER.size :], zlib.crc32(header))


def _sections(data: bytes, sizes: list[int]) -> list[Tensor]:
    payload = torch.frombuffer(bytearray(data[HEADER.size :]), dtype=torch.uint8)
    return [section.clone() for section in payload.split(sizes)]  # clones start aligned, whatever lies before them

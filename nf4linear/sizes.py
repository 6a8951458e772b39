"""Bytes in words and back, in decimal units as file managers and the model hub count them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def format_size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


def parse_size(size: str | int) -> int:
    """Bytes of 5000000000, "5GB" or "4.5GiB"; raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)?\s*", str(size), re.IGNORECASE)
    nbytes = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if nbytes <= 0:
        raise ValueError(f"a size must look like 5GB, 500MB or 4GiB; got {size!r}")
    return nbytes

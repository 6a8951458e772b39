"""Result files: what their heads say of a run, and how they are written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those of `packages` that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def made_by(record: Row) -> str:
    """The sentence of a report that says what its result file was made by."""
    made = f"`{record['command']}`, {record['date']}, commit {record['commit']}"
    return f"{made}; {', '.join(f'{name} {version}' for name, version in record['versions'].items())}."


def commit() -> str | None:
    """The commit of the checkout that this package lies in; None outside of one."""
    return first_line_of("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")


def first_line_of(*command: str) -> str | None:
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0] if lines else None


def write(path: Path, data: bytes) -> None:
    """Replace `path` at once: a run that is stopped leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_record(path: Path, record: Row) -> None:
    write(path, (json.dumps(record, indent=1) + "\n").encode())

"""The installed version of this package."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    try:
        return metadata.version("nf4linear")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"

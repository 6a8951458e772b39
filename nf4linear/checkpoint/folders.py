"""Source and destination folders: where they are, that they are apart, and the small files beside the weights."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from ..formats import FORMAT_VERSION
from ..hub import NoSuchModel, local_folder
from ..version import installed_version
from .packed import SOURCE_FILE
from .shards import INDEX_FILE, Checkpoint, CheckpointError
from .writer import JOB_FILE

SOURCE_CARD = "README.source.md"
# Weights in any form, which are never copied: pack rewrites the safetensors and does not touch the others.
_WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".npz",
}  # fmt: skip
_WRITTEN = {"config.json", "README.md", INDEX_FILE, SOURCE_FILE, JOB_FILE}
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.py", "*.tiktoken"]


def fetch_source(src: str | Path, revision: str | None = None) -> Path:
    """The folder `src`, or the local snapshot of the hub model of that name."""
    try:
        folder = local_folder(src)
    except NoSuchModel as error:
        raise CheckpointError(str(error)) from error
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(src), revision=revision, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # network, authorisation, or no such model: the hub client has a class for each
        raise CheckpointError(f"{src}: is not a folder, and the model hub did not give it ({error})") from error


def check_apart(src: Path, dst: Path) -> None:
    if src == dst or src in dst.parents or dst in src.parents:
        raise CheckpointError(f"{dst}: is the source folder, inside it or around it; choose a folder apart from {src}")


def source_fingerprint(source: Checkpoint) -> dict[str, Any]:
    """What must be unchanged for an interrupted run to go on: files, their sizes and times, and this version."""
    files = {}
    for path in [source.folder / "config.json", *(shard.path for shard in source.shards)]:
        stat = path.stat()
        files[path.name] = [stat.st_size, stat.st_mtime_ns]
    headers = hashlib.sha256(repr([shard.entries for shard in source.shards]).encode()).hexdigest()
    return {"files": files, "headers": headers, "format_version": FORMAT_VERSION, "version": installed_version()}


def copy_small_files(src: Path, dst: Path, card: tuple[str, str]) -> None:
    """Tokenizer, generation config, chat templates and the like; `card` is the model card's (name in src, in dst)."""
    for path in sorted(src.iterdir()):
        if path.is_file() and path.name == card[0]:
            shutil.copyfile(path, dst / card[1])
        elif path.is_file() and path.name not in _WRITTEN and not _is_left_out(path):
            shutil.copyfile(path, dst / path.name)
        elif path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, dst / path.name, dirs_exist_ok=True)


def _is_left_out(path: Path) -> bool:
    return path.name.startswith(".") or path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")

"""Two methods of transformers' models that cannot know of packed layers, wrapped once such a model exists.

transformers offers no hook for either: `num_parameters` would count bytes and scales as weights, and
`save_pretrained` would leave behind the file that unpack needs. Models without packed layers are not affected.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from .checkpoint.packed import QUANT_METHOD, VERSION_KEY
from .patch_report import uncounted_weights

_MARK = "_knows_packed_layers"


def extend_transformers() -> None:
    """Wrap the methods; calling it again does nothing."""
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel.num_parameters, _MARK):
        for name, wrap in (("num_parameters", _with_logical_counts), ("save_pretrained", _with_source_file)):
            wrapped = wrap(getattr(PreTrainedModel, name))
            setattr(wrapped, _MARK, True)
            setattr(PreTrainedModel, name, wrapped)


def _with_logical_counts(original: Any) -> Any:
    @functools.wraps(original)
    def num_parameters(self: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        count = original(self, only_trainable, exclude_embeddings)
        return count if only_trainable else count + uncounted_weights(self)

    return num_parameters


def _with_source_file(original: Any) -> Any:
    @functools.wraps(original)
    def save_pretrained(self: nn.Module, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        quantizer = getattr(self, "hf_quantizer", None)
        is_ours = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None) == QUANT_METHOD
        if not is_ours or not kwargs.get("is_main_process", True) or os.path.isfile(save_directory):
            return original(self, save_directory, *args, **kwargs)
        # Before the weights, so that push_to_hub=True uploads it with them.
        copy_source_file(quantizer.source_file, Path(save_directory))
        result = original(self, save_directory, *args, **kwargs)
        for path in Path(save_directory).glob("*.safetensors"):
            sort_metadata(path)
        return result

    return save_pretrained


def copy_source_file(source: Path | None, folder: Path) -> None:
    if source is None or folder.resolve() == source.parent.resolve():
        return
    if not source.is_file():
        warnings.warn(f"{source} is gone, so the saved checkpoint cannot be unpacked byte for byte", stacklevel=4)
        return
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / source.name)


def sort_metadata(path: Path) -> None:
    """Put the metadata of a safetensors file in order, in place: its writer shuffles it, and equal models should give
    equal files."""
    start = b'{"__metadata__":'
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, 4096))
        end = header.find(b"}") + 1
        if not header.startswith(start) or not end:
            return
        try:
            metadata = json.loads(header[len(start) : end])
        except ValueError:  # a brace inside a value
            return
        ordered = json.dumps(dict(sorted(metadata.items())), separators=(",", ":")).encode()
        if VERSION_KEY in metadata and len(ordered) == end - len(start):
            file.seek(8 + len(start))
            file.write(ordered)

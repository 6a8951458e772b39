"""Tiny random models of several architectures, saved plain, quantized by bitsandbytes, and packed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tiny_models import auto_class, bnb_config, tiny_config

pytest_plugins = ["demo_model"]
# Modules of shared tests, which say as much about a failure as test modules do.
pytest.register_assert_rewrite("order_of_work", "prefill", "fused", "operands")

# Processes that tests start import the package that this one imports. Without this, `python -c` in a checkout would
# find the sources there before an installed package. (PYTHONSAFEPATH is Python 3.11's; tests that load native code in
# such a process choose its folder too.)
HOME = str(Path(find_spec("nf4linear").origin).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([HOME, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["PYTHONSAFEPATH"] = "1"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a saved bfloat16 model of an architecture."""
    folders: dict[str, Path] = {}

    def make(architecture: str = "llama") -> Path:
        if architecture not in folders:
            torch.manual_seed(0)
            folders[architecture] = tmp_path_factory.mktemp(architecture)
            model = auto_class(architecture).from_config(tiny_config(architecture)).bfloat16()
            model.save_pretrained(folders[architecture])
        return folders[architecture]

    return make


@pytest.fixture(scope="session")
def tiny_bnb(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of the same model quantized and saved by bitsandbytes."""
    folders: dict[tuple, Path] = {}

    def make(architecture: str = "llama", bits: int = 4, **options) -> Path:
        key = (architecture, bits, *sorted(options.items()))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"{architecture}-bnb{bits}")
            config = bnb_config(bits, **options)
            auto_class(architecture).from_pretrained(tiny(architecture), quantization_config=config).save_pretrained(
                folders[key]
            )
        return folders[key]

    return make


@pytest.fixture(scope="session")
def tiny_packed(tiny_bnb: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of the bitsandbytes model, patched and saved in packed form."""
    folders: dict[tuple[str, int], Path] = {}

    def make(architecture: str = "llama", bits: int = 4) -> Path:
        import nf4linear

        if (architecture, bits) not in folders:
            folder = folders[architecture, bits] = tmp_path_factory.mktemp(f"{architecture}-packed{bits}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = auto_class(architecture).from_pretrained(tiny_bnb(architecture, bits))
                nf4linear.patch_model(model, progress=False).save_pretrained(folder)
        return folders[architecture, bits]

    return make


@pytest.fixture(autouse=True)
def remarks_afresh() -> Iterator[None]:
    """Remarks that are made once a process are made once a test."""
    yield
    import sys

    module = sys.modules.get("nf4linear.bnb")
    if module is not None:
        module.warn_once.cache_clear()

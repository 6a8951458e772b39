"""Registers the transformers quantizer as soon as transformers is there, in whichever order the two are imported.

transformers finds quantizers in its own tables only, so `import nf4linear` has to write itself into them. Importing
transformers for that would make `import nf4linear` take seconds and fail where it is broken or absent; instead a
finder waits for the module that every from_pretrained needs, registers right after it has run, and steps aside.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_AWAITED = "transformers.modeling_utils"


def register_with_transformers() -> None:
    """Register now if transformers' models are loaded, else when they are."""
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiter) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiter())


def _register() -> None:
    importlib.import_module(".hf", __package__)  # registers at its end


class _Waiter(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # leave no trace for inspect and pickle
        self._loader.exec_module(module)
        _register()

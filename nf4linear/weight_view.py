"""What `layer.weight` returns: the dequantized weight, computed only when its values are asked for.

Modeling code reads `layer.weight.dtype` and `.device` in its forward passes, so those answers must not cost a
dequantization; code that multiplies by it, copies it or prints it gets the values. Nothing can be written through it:
a plain temporary tensor would take the write and forget it, and a merge would be lost without a word.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Layer(Protocol):
    """What the view needs of its layer, which stands above it."""

    in_features: int
    out_features: int
    compute_dtype: torch.dtype
    qweight: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor: ...
    def describe(self) -> str: ...


class DequantizedWeight(torch.Tensor):
    """Read-only [out_features, in_features] view of a packed layer, in its compute dtype and on its device.

    Every operation sees a fresh dequantized tensor and returns plain tensors; writing raises RuntimeError.
    """

    _layer: Layer
    _is_hf_initialized = True  # transformers leaves such tensors alone when it fills new layers

    @staticmethod
    def __new__(cls, layer: Layer) -> DequantizedWeight:
        self = torch.Tensor._make_wrapper_subclass(
            cls, (layer.out_features, layer.in_features), dtype=layer.compute_dtype, device=layer.qweight.device
        )
        self._layer = layer
        return self

    def materialize(self) -> Tensor:
        """A plain tensor with the values."""
        return self._layer.dequantize(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") in ("__set__", "__setitem__") and isinstance(args[0], cls):
            args[0]._refuse_write()
        # The default would dress results up as views of the layer.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:  # `.data`: still a view, so that `.data += delta` is caught
            return cls(args[0]._layer)
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, cls):
                value._refuse_write()
        args, kwargs = tree_map_only(cls, cls.materialize, (args, kwargs))
        return func(*args, **kwargs)

    def _refuse_write(self) -> NoReturn:
        raise RuntimeError(
            f"{self._layer.describe()}: its weight is quantized, it cannot be changed in place. "
            "Leave adapters unmerged, or put an nn.Linear with layer.dequantize(dtype) in its place"
        )

    # Methods that read the memory of a tensor without an operator in between.
    def numpy(self, *, force: bool = False) -> Any:
        return self.materialize().numpy(force=force)

    def tolist(self) -> list:
        return self.materialize().tolist()

    def data_ptr(self) -> NoReturn:
        raise RuntimeError(
            f"{self._layer.describe()}: its weight is quantized and has no memory of its own; "
            "take layer.dequantize(dtype) and keep that tensor alive while its pointer is used"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.materialize())

    def __deepcopy__(self, memo: dict) -> Tensor:
        return memo.setdefault(id(self), self.materialize())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

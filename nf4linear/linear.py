"""NF4Linear and W8Linear: drop-in nn.Linear layers that hold one weight in kernel order.

The packed tensors (see formats.py) are parameters without gradient, so that loaders, device maps and sharding plans
see them. `layer.weight` is no parameter: it is a read-only view that dequantizes on use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import bnb, eager, ops, reference, reorder
from .formats import EightBitSpec, FourBitSpec, WeightSpec, check_packed, dtype_name, dynamic_map, spec_from_config
from .plain import is_conv1d
from .weight_view import DequantizedWeight

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt


class PackedLinear(nn.Linear):
    """y = x @ weight.T + bias with a quantized weight; base of NF4Linear and W8Linear.

    Input float32, float16 or bfloat16 of any leading shape [..., in_features]; output of the same dtype (under
    autocast: the autocast dtype), accumulated in float32. Gradients flow to the input and the bias, never to the
    weight. Device moves pass; dtype casts change the bias and `compute_dtype` only, never codes or scales.

    Attributes: `spec`, `in_features`, `out_features`, `bias`, `compute_dtype` (the dtype of `weight`), `layer_name`
    (the name inside its model, for messages), `source_cls` (the class it stands for: nn.Linear or Conv1D), `origin`,
    and the tensors of `spec.packed_tensors()`.
    """

    default_format: ClassVar[str] = "nf4"
    # For transformers: never fill such a layer with random numbers.
    _is_hf_initialized = True

    def __init__(
        self, spec: WeightSpec, bias: bool = True, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        # nn.Linear.__init__ would allocate and fill a full weight.
        nn.Module.__init__(self)
        self.spec = spec
        self.in_features, self.out_features = spec.k, spec.n
        self.layer_name = ""
        self.origin = bnb.Origin()
        self.source_cls: type[nn.Module] = nn.Linear  # Conv1D holds the transposed weight
        self.compute_dtype = _float_dtype(dtype or torch.get_default_dtype())
        # Code that asks a module for its dtype takes the first floating parameter: let that be the bias.
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(spec.n, dtype=self.compute_dtype, device=device)) if bias else None
        )
        self._packed_names = tuple(spec.packed_tensors())
        for name, tensor in _zero_weight(spec, device).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._scales_name = spec.scales_name
        self._bound: eager.Bound | None = None

    @staticmethod
    def from_spec(
        spec: WeightSpec, bias: bool = True, device: Any = None, dtype: torch.dtype | None = None
    ) -> PackedLinear:
        """A layer of the class that fits `spec`, holding a weight of zeros."""
        cls = NF4Linear if isinstance(spec, FourBitSpec) else W8Linear
        layer = cls.__new__(cls)
        PackedLinear.__init__(layer, spec, bias, device, dtype)
        return layer

    @classmethod
    def from_linear(
        cls, linear: nn.Module, *, name: str = "", format: str | None = None, **options: Any
    ) -> PackedLinear:
        """Quantize an nn.Linear (or a transformers Conv1D) on its own device; the bias parameter is shared, no copy.

        `options` are those of the format: blocksize and double_quant (4 bit), group_size (8 bit).
        Raises ValueError for a weight that is not finite, not floating or on the meta device.
        """
        transposed = is_conv1d(linear)
        weight = linear.weight.detach()
        where = name or type(linear).__name__
        if not weight.is_floating_point() or weight.is_meta:
            raise ValueError(f"{where}: weight is {weight.dtype} on {weight.device}; it must be loaded and floating")
        weight = weight.t() if transposed else weight
        spec = spec_from_config({"format": format or cls.default_format, **options}, *weight.shape)
        try:
            packed = reorder.pack(spec, reference.quantize(spec, weight), where)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        layer = cls.from_spec(spec, bias=False, device="meta", dtype=_float_dtype(weight.dtype))
        layer.layer_name = name
        layer.origin = bnb.Origin(dtype=dtype_name(weight.dtype))
        layer.source_cls = type(linear) if transposed else nn.Linear
        return layer.load_packed(packed, linear.bias)

    @classmethod
    def from_bnb(
        cls, layer: Linear4bit | Linear8bitLt, *, name: str = "", dtype: torch.dtype | None = None
    ) -> PackedLinear:
        """Take over a bitsandbytes layer of either width, on its device: same codes and scales, in kernel order.

        `dtype` is the compute dtype: by default that of the bias, else of the weight before quantization. The bias,
        and tensors that keep their order, are shared with `layer`, which is not changed.
        Raises ValueError or TypeError naming the layer for anything that is not complete and consistent.
        """
        where = name or type(layer).__name__
        spec, canonical, origin = bnb.read_layer(layer, where)
        dtype = dtype or (getattr(torch, origin.dtype) if layer.bias is None else layer.bias.dtype)
        packed = cls.from_spec(spec, bias=False, device="meta", dtype=dtype)
        packed.layer_name, packed.origin = name, origin
        packed.source_cls = getattr(layer, "source_cls", nn.Linear)
        return packed.load_packed(reorder.pack(spec, canonical, where), layer.bias)

    def to_bnb(self) -> Linear4bit | Linear8bitLt:
        """The bitsandbytes layer with the same bytes; it shares the bias. Raises ValueError if there is no such one."""
        canonical = reorder.unpack(self.spec, self.packed(), self.describe())
        layer = bnb.make_layer(self.spec, canonical, self.origin, self.describe())
        layer.bias = self.bias
        layer.source_cls = self.source_cls
        return layer.train(self.training)

    def packed(self) -> dict[str, Tensor]:
        """The packed tensors by name, as they are held (no copy)."""
        return {name: self._parameters[name] for name in self._packed_names}

    def load_packed(self, tensors: Mapping[str, Tensor], bias: Tensor | None = None) -> PackedLinear:
        """Hold `tensors` (exactly those of `spec.packed_tensors()`; large ones are not copied) and `bias`; return self.

        Raises ValueError naming the layer and the tensor on a missing or surplus name, a wrong dtype or shape, or
        statistics that cannot be: nothing is changed then.
        """
        check_packed(self.spec, tensors, self.describe())
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ValueError(f"{self.describe()}: bias is {list(bias.shape)}, expected [{self.out_features}]")
        for name in self._packed_names:
            tensor = tensors[name].detach()
            # Tables may come from one shared tensor; a checkpoint would save that as tied.
            tensor = tensor.clone() if name in _TABLES else tensor.contiguous()
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias)
        self.register_parameter("bias", bias)
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [out_features, in_features] in `dtype` (`compute_dtype` if None), rounded once from float32."""
        return ops.dequantize(*self._weight_arguments(), *self._spec_arguments(), dtype or self.compute_dtype)

    def forward(self, input: Tensor) -> Tensor:
        compiling = is_compiling()
        p = self._parameters
        bias = p["bias"]
        if not compiling and eager.plain_call(input, bias):
            # The eager call past the dispatcher, on a weight bound at the first one.
            bound = self._bound
            if (
                bound is None
                or bound.dtype is not input.dtype
                or bound.pointers != eager.data_pointers(p["qweight"], p[self._scales_name])
            ):
                bound = self._bound = eager.bind(self.spec, self._weight_arguments(), input)
            if bound is not None and (output := bound.linear(input, bias)) is not None:
                return output
        device = input.device.type
        if device != "meta" and torch.is_autocast_enabled(device) and input.dtype in ops.FLOAT_DTYPES:
            input = input.to(torch.get_autocast_dtype(device))
        if input.dtype not in ops.FLOAT_DTYPES or input.dim() == 0 or input.shape[-1] != self.in_features:
            self._refuse_input(input)
        if bias is not None and bias.dtype != input.dtype:
            bias = bias.to(input.dtype)
        if not compiling and torch._C._are_functorch_transforms_active():
            # The operator has no rules for torch.func: it would drop tangents without a word.
            return nn.functional.linear(input, self.dequantize(input.dtype), bias)
        # Between compiling and the first run of the compiled code, whatever wrote the weight has long ended.
        return ops.linear(input, *self._weight_arguments(), bias, *self._spec_arguments(), settled=compiling)

    def _weight_arguments(self) -> tuple[Tensor | None, ...]:
        p = self._parameters
        nested = p.get("nested_code"), p.get("nested_absmax"), p.get("nested_offset")
        return p["qweight"], p[self._scales_name], *nested

    def _spec_arguments(self) -> tuple[str, int, int, int]:
        return self.spec.format, self.out_features, self.in_features, self.spec.blocksize

    def _refuse_input(self, input: Tensor) -> NoReturn:
        if input.dtype not in ops.FLOAT_DTYPES:
            raise TypeError(f"{self.describe()}: input is {input.dtype}; float32, float16 and bfloat16 are taken")
        raise ValueError(f"{self.describe()}: input is {list(input.shape)}; it must end in {self.in_features}")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Read-only [out_features, in_features] in `compute_dtype`; dequantized anew each time its values are used."""
        if is_compiling():
            return self.dequantize()
        return DequantizedWeight(self)

    @weight.setter
    def weight(self, value: Any) -> None:
        self._refuse_assignment()

    def _refuse_assignment(self) -> NoReturn:
        raise AttributeError(
            f"{self.describe()}: its weight is quantized and cannot be assigned; build a new layer with from_linear()"
        )

    def reset_parameters(self) -> None:
        raise RuntimeError(f"{self.describe()}: a quantized weight cannot be initialised; load or quantize one")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":
            self._refuse_assignment()
        packed = name in self.__dict__.get("_packed_names", ())
        if packed:
            self._bound = None  # it looks at two of the pointers only
        if param is not None and packed:
            param.requires_grad_(False)  # loaders make float parameters trainable
        if param is not None and not _readable(param, 16 if packed else param.element_size()):
            param.data = param.data.clone(memory_format=torch.contiguous_format)
        super().register_parameter(name, param)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The layer that this one replaces (nn.Linear or Conv1D), holding the dequantized weight in `dtype`."""
        with torch.device("meta"):
            if self.source_cls is nn.Linear:
                layer = nn.Linear(self.in_features, self.out_features, bias=False)
            else:
                layer = self.source_cls(self.out_features, self.in_features)
        weight = self.dequantize(dtype)
        layer.weight = nn.Parameter(weight if self.source_cls is nn.Linear else weight.t().contiguous(), False)
        bias = self._parameters["bias"]
        layer.bias = None if bias is None else nn.Parameter(bias.detach().to(weight.dtype), bias.requires_grad)
        return layer.train(self.training)

    def describe(self) -> str:
        """Name and kind for messages, such as "model.layers.0.mlp.up_proj (NF4Linear 576 -> 1536)"."""
        kind = f"{type(self).__name__} {self.in_features} -> {self.out_features}"
        return f"{self.layer_name} ({kind})" if self.layer_name else kind

    def extra_repr(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.spec.to_config().items() if value is not None)
        bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {options}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        packed = {id(p) for name in self._packed_names if (p := self._parameters[name]) is not None}
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self._parameters["qweight"].device))
        super()._apply(lambda t: _move_bytes(fn, t) if id(t) in packed else fn(t), recurse)
        if probe.dtype in ops.FLOAT_DTYPES:
            self.compute_dtype = probe.dtype
        return self

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self._bound = None  # the values change where they lie
        error_msgs = arguments[-1]
        where = prefix.removesuffix(".") or type(self).__name__
        given = {name: state_dict[prefix + name] for name in self._packed_names if prefix + name in state_dict}
        if prefix + "weight" in state_dict:
            error_msgs.append(f"{where}: this layer holds packed tensors, 'weight' is a plain one; use from_linear()")
            return
        if given:
            # Fewer would leave codes and scales of different weights together, so strict=False allows none.
            try:
                check_packed(self.spec, given, where)
            except ValueError as error:
                error_msgs.append(str(error))
                return
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class NF4Linear(PackedLinear):
    """A 4-bit layer (format "nf4" or "fp4"), bitsandbytes' codes and scales bit for bit."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "nf4",
        blocksize: int = 64,
        double_quant: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(FourBitSpec(format, out_features, in_features, blocksize, double_quant), bias, device, dtype)


class W8Linear(PackedLinear):
    """An 8-bit weight-only layer: activations stay in their own dtype and are never quantized."""

    default_format = "w8_s8"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "w8_s8",
        group_size: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(EightBitSpec(format, out_features, in_features, group_size), bias, device, dtype)


_TABLES = ("code", "nested_code", "nested_offset")


def _zero_weight(spec: WeightSpec, device: Any) -> dict[str, Tensor]:
    """Packed tensors that decode to zeros, float32 whatever the default dtype."""
    tensors = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in spec.packed_tensors().items()
    }
    if tensors["qweight"].is_meta:
        return tensors
    if isinstance(spec, EightBitSpec):
        tensors["qweight"].fill_(spec.integer.xor)
        return tensors
    tensors["qweight"].fill_(spec.codebook.zero_code * 0x11)
    tensors["code"].copy_(torch.tensor(spec.codebook.code, dtype=torch.float32))
    if spec.double_quant:
        tensors["nested_code"].copy_(torch.tensor(dynamic_map(), dtype=torch.float32))
    return tensors


def _move_bytes(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply a device move to a packed tensor; what `fn` would do to its values does not happen."""
    as_bytes = tensor.detach().reshape(-1).view(torch.uint8)
    moved = fn(as_bytes)
    if moved.dtype != torch.uint8:  # Module.type(dtype) casts integers too
        moved = as_bytes.to(moved.device)
    return moved.view(tensor.dtype).view(tensor.shape)


def _readable(tensor: Tensor, alignment: int) -> bool:
    """Whether a native library can read a tensor: a loader may have mapped it at any byte of a file, or cut it out."""
    return tensor.is_contiguous() and (tensor.device.type != "cpu" or tensor.data_ptr() % alignment == 0)


def _float_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in ops.FLOAT_DTYPES else torch.float32

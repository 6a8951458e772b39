"""The transformers quantizer "nf4linear": loads packed checkpoints, saves them, quantizes plain ones while they load.

Imported once transformers is (see registration.py). The quantizer needs transformers >= 5.17; with older ones
patch_model still works, and loading a packed checkpoint says what to install.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import bnb, hf_model
from .checkpoint.packed import METADATA, QUANT_METHOD, SOURCE_FILE, ModuleRules, parse_config, validate_packed
from .formats import FORMAT_VERSION, check_packed, config_entry, spec_from_config
from .linear import PackedLinear
from .model_rules import aliases, describe_quantization, layers_to_pack, packed_layers, packed_places
from .select import select_layers
from .swap import swap_layer
from .version import installed_version

MINIMUM_TRANSFORMERS = "5.17"


class NF4LinearConfig(QuantizationConfigMixin):
    """quantization_config of a packed checkpoint, or of a plain one to be quantized while it loads.

    `modules` maps full names and globs to formats, "default" to all others; without it `format`, `blocksize` and
    `double_quant` are the default. `modules_to_not_convert` lists full names or whole dotted suffixes of layers that
    are not packed; when a plain checkpoint is quantized it is patch_model's `skip` (globs and any run of dotted parts
    too) and adds to what stays anyway: output and tied embeddings, layers kept in float32.
    Only JSON types are held. Raises ValueError for options that no weight can have; `modules` and the version, which
    may come from a file, are checked by `rules`.
    """

    def __init__(
        self,
        modules: dict[str, dict[str, Any]] | None = None,
        modules_to_not_convert: Iterable[str] | None = None,
        format_version: int = FORMAT_VERSION,
        plugin_version: str | None = None,
        *,
        format: str = "nf4",
        blocksize: int = 64,
        double_quant: bool = True,
        **ignored: Any,  # a later version's additions; what would change a meaning raises format_version
    ) -> None:
        self.quant_method = QUANT_METHOD
        self.format_version = format_version
        self.plugin_version = plugin_version or installed_version()
        self.modules = dict(modules) if isinstance(modules, dict) else modules
        if modules is None:
            self.modules = {"default": config_entry(format, blocksize, double_quant)}
        skipped = [] if modules_to_not_convert is None else modules_to_not_convert
        self.modules_to_not_convert = list(skipped) if isinstance(skipped, Iterable) else skipped

    def rules(self, where: str = "quantization_config") -> ModuleRules:
        """What holds for which layer; raises ValueError naming `where` and the key for what cannot be read."""
        rules = parse_config({"quantization_config": self.to_dict()}, where)
        rules.check_entries()
        return rules


class NF4LinearQuantizer(HfQuantizer):
    """Puts packed layers in the place of a model's linear layers before its checkpoint is read."""

    requires_calibration = False
    quantization_config: NF4LinearConfig

    def __init__(self, quantization_config: NF4LinearConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.source_file: Path | None = None  # nf4linear_source.json of the folder the model came from
        self._folder: Path | None = None  # where its weights are read from
        self._to_quantize: frozenset[str] = frozenset()  # layers of a plain checkpoint
        if not self.pre_quantized:
            quantization_config.rules()  # early; what a checkpoint says is checked when its folder is known

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if Version(transformers.__version__).release < Version(MINIMUM_TRANSFORMERS).release:
            raise ImportError(
                f"loading a packed nf4linear checkpoint needs transformers >= {MINIMUM_TRANSFORMERS}, found "
                f"{transformers.__version__}: update it, or load the bitsandbytes checkpoint and use patch_model"
            )
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "a plain checkpoint cannot be quantized while parts of it go to disk: the disk would hold the plain "
                "weights. Pack it first (nf4linear pack SRC DST) and load that with the same device_map"
            )

    def _process_model_before_weight_loading(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        checkpoint_files: list[str] | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        _refuse_tensor_parallel(model)
        if not self.pre_quantized:
            self._to_quantize = self._select(model)
            return model
        shapes = {}
        self._folder = Path(checkpoint_files[0]).parent if checkpoint_files else None
        where = "config.json" if self._folder is None else str(self._folder / "config.json")
        for names, module, spec in layers_to_pack(model, self.quantization_config.rules(where)):
            layer = PackedLinear.from_spec(spec, bias=module.bias is not None, device="meta", dtype=dtype)
            layer.layer_name, layer.source_cls = names[0], type(module)
            swap_layer(model, names, module, layer)
            shapes |= {alias: (spec.n, spec.k) for alias in aliases(model, names[0])}
        self._check_files(checkpoint_files, shapes)
        return model

    def _select(self, model: nn.Module) -> frozenset[str]:
        """Names of the layers of a plain model that are quantized while it loads."""
        selection = select_layers(model, self.quantization_config.modules_to_not_convert)
        for entry in selection.unmatched:
            warnings.warn(f"modules_to_not_convert: {entry!r} matches no module of the model", stacklevel=2)
        names = frozenset(name for layer in selection.layers for name in layer.names)
        rules = self.quantization_config.rules()
        if unruled := sorted(name for name in names if rules.entry(name) is None):
            raise ValueError(
                f"quantization_config.modules has no format for {unruled[0]!r} and no default; add one, or list the "
                "layer in modules_to_not_convert"
            )
        return names

    def _check_files(self, checkpoint_files: list[str] | None, shapes: dict[str, tuple[int, int]]) -> None:
        """Read the headers first: transformers itself only warns of missing and surplus tensors."""
        if not checkpoint_files:
            return
        folder = self._folder
        if checkpoint_files[0].endswith(".safetensors") and (folder / "config.json").is_file():
            validate_packed(folder, shapes, [Path(file).name for file in checkpoint_files])
        if (folder / SOURCE_FILE).is_file():
            self.source_file = folder / SOURCE_FILE

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name, layer in packed_layers(model).items():
            layer.layer_name = name
            if layer.qweight.is_meta or hasattr(layer, "_hf_hook"):
                continue  # offloaded: accelerate brings the tensors when they are needed
            where = name if self._folder is None else f"{self._folder}: layer {name!r}"
            for part, parameter in layer.named_parameters(recurse=False):
                if not getattr(parameter, "_is_hf_initialized", False):
                    raise ValueError(f"{where}: tensor {part!r} is missing in the checkpoint; pack it again")
            check_packed(layer.spec, layer.packed(), where)
        if not self.pre_quantized:
            described = describe_quantization(model)
            self.quantization_config.modules = described["modules"]
            self.quantization_config.modules_to_not_convert = described["modules_to_not_convert"]
        hf_model.extend_transformers()
        return model

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        name, _, part = param_name.rpartition(".")
        return part == "weight" and name in self._to_quantize

    def get_quantize_ops(self) -> Any:
        from .hf_quantize import QuantizeLinear

        return QuantizeLinear(self.quantization_config)

    @property
    def quantized_element_size(self) -> float | None:
        """Bytes a weight of a plain checkpoint will take; packed ones have their true sizes on the meta device."""
        if self.pre_quantized:
            return None
        spec = spec_from_config(self.quantization_config.modules.get("default", {"format": "nf4"}), 4096, 4096)
        return sum(tensor.nbytes() for tensor in spec.packed_tensors().values()) / (spec.n * spec.k)

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        # Older versions of transformers ask here and do not know quantized_element_size.
        needs = self.param_needs_quantization(model, param_name)
        return self.quantized_element_size if needs else param.element_size()

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be trained on top: gradients flow through the layers, their own weights stay fixed."""
        return True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[None, dict[str, str]]:
        for name, module in model.named_modules():
            if bnb.layer_bits(module):
                raise ValueError(
                    f"{name}: is still a bitsandbytes layer, which a checkpoint cannot hold beside packed ones. Patch "
                    "it too (take it off the skip list), or call unpatch_model before saving"
                )
        return None, dict(METADATA)

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        layers = packed_places(model)
        for layer in layers:
            if layer.qweight.is_meta:
                raise ValueError(f"{layer.describe()}: its weight is offloaded; load the model to one device first")
        for layer, names in layers.items():
            swap_layer(model, names, layer, layer.to_linear(dtype))
        return model


def _refuse_tensor_parallel(model: nn.Module) -> None:
    distributed = getattr(model.config, "distributed_config", None)
    if any((getattr(distributed, size, None) or 1) > 1 for size in ("tp_size", "ep_size")):
        raise NotImplementedError(
            "nf4linear does not load under tensor or expert parallelism yet (tp_plan); use device_map='auto' to spread "
            "the layers over several GPUs"
        )


def register() -> None:
    """Make transformers know the method; calling it again does nothing."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(QUANT_METHOD, NF4LinearConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(QUANT_METHOD, NF4LinearQuantizer)


register()

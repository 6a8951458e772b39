"""Loads what a command calls MODEL: a packed, bitsandbytes or plain folder, or the name of one on the hub.

One quantized model can be run in four ways, its variants:

    16-bit         the weights before quantization, in plain layers
    bitsandbytes   quantized, in bitsandbytes' own layers
    exact          bitsandbytes' dequantized weights in plain layers: every scale in float32, each weight rounded once.
                   What a quantized linear layer should compute, hence the yardstick
    nf4linear      quantized, in this package's layers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..formats import QUANTIZED_FORMATS
from ..hub import NoSuchModel, check_on_hub, local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

VARIANTS = ("16-bit", "bitsandbytes", "exact", "nf4linear")
DTYPES = {"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class LoadError(ValueError):
    """MODEL cannot be loaded in the way asked for; the text says what to do instead."""


@dataclass(frozen=True)
class ModelSource:
    """A model and where and how it is to run.

    device: a torch device, or "auto" to spread the model over all GPUs; dtype: a key of DTYPES; format: what the layers
    of a plain model are quantized to; base: the 16-bit model that a quantized one was made from, if at hand.
    """

    path: str
    device: str | None = None
    dtype: str = "auto"
    format: str = "nf4"
    base: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LoadError(f"--dtype {self.dtype}: known are {', '.join(DTYPES)}")
        if self.format not in QUANTIZED_FORMATS:
            raise LoadError(f"--format {self.format}: known are {', '.join(QUANTIZED_FORMATS)}")
        if self.device not in (None, "auto"):
            _check_device(self.device)

    @property
    def device_map(self) -> Any:
        if self.device == "auto":
            return "auto"
        return {"": self.device or ("cuda:0" if torch.cuda.is_available() else "cpu")}

    def config(self) -> PreTrainedConfig:
        """The model's config. Raises LoadError, soon, where there is none."""
        from transformers import AutoConfig

        import nf4linear  # noqa: F401 - registers the packed format

        self._find()
        try:
            return AutoConfig.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise LoadError(f"{self.path}: no model found there: {str(error).splitlines()[0]}") from error

    def quantization(self) -> str | None:
        """ "nf4linear", "bitsandbytes", another method's name, or None for a plain model."""
        quantization = getattr(self.config(), "quantization_config", None) or {}
        quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
        method = quantization.get("quant_method")
        return None if method is None else str(getattr(method, "value", method))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        self._find()
        return AutoTokenizer.from_pretrained(self.path)

    def _find(self) -> None:
        """Raises LoadError where the model or its base is nowhere."""
        try:
            for path in (self.path, self.base):
                if path is not None and local_folder(path) is None:
                    check_on_hub(path)
        except NoSuchModel as error:
            raise LoadError(str(error)) from error

    def variants(self) -> list[str]:
        """The variants that can be loaded from this source, in the order of VARIANTS."""
        plain = self.quantization() is None
        return [variant for variant in VARIANTS if variant != "16-bit" or plain or self.base]

    def load(self, variant: str = "nf4linear") -> PreTrainedModel:
        """The model in evaluation mode as one of its VARIANTS. Raises LoadError where that cannot be had."""
        if variant not in VARIANTS:
            raise LoadError(f"variant {variant}: known are {', '.join(VARIANTS)}")
        method = self.quantization()
        if method not in (None, "nf4linear", "bitsandbytes"):
            raise LoadError(
                f"{self.path}: quantized with {method!r}; bitsandbytes, nf4linear and plain models are read"
            )
        if variant == "16-bit":
            return self._load_16_bit(method)
        if variant == "nf4linear":
            return self._load_nf4linear(method)
        model = self._load_bitsandbytes(method)
        return replace_with_dequantized(model) if variant == "exact" else model

    def _from_pretrained(self, path: str, **options: Any) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        dtype = DTYPES[self.dtype]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=self.device_map, **options)
        # transformers 5.24 leaves the unquantized tensors of a bitsandbytes checkpoint in the file's dtype.
        return (model if dtype == "auto" else cast_unquantized(model, dtype)).eval()

    def _load_16_bit(self, method: str | None) -> PreTrainedModel:
        if method is not None and self.base is None:
            raise LoadError(f"{self.path}: it is quantized; name the 16-bit model that it was made from")
        return self._from_pretrained(self.base or self.path)

    def _load_nf4linear(self, method: str | None) -> PreTrainedModel:
        import nf4linear

        if method == "nf4linear":
            return self._from_pretrained(self.path)
        if method == "bitsandbytes":
            with nf4linear.patched_loading():
                return self._from_pretrained(self.path)
        # Quantized tensor by tensor on the device: a 16-bit model that does not fit may fit so.
        return self._from_pretrained(self.path, quantization_config=nf4linear.NF4LinearConfig(format=self.format))

    def _load_bitsandbytes(self, method: str | None) -> PreTrainedModel:
        import nf4linear

        if method == "nf4linear" or (method is None and self.format not in ("nf4", "fp4")):
            return nf4linear.unpatch_model(self._load_nf4linear(method))
        if method == "bitsandbytes":
            return self._from_pretrained(self.path)
        from transformers import BitsAndBytesConfig

        dtype = DTYPES[self.dtype]
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.format,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
        )
        return self._from_pretrained(self.path, quantization_config=config)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise LoadError(f"--device {device}: this installation of torch cannot use it: {reason}") from error


def cast_unquantized(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the floating parameters that hold no quantized data, in place; those that stay in float32 on purpose do."""
    import bitsandbytes as bnb

    from ..linear import PackedLinear

    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            module.to(dtype)
            continue
        if kept.intersection(name.split(".")):
            continue
        for parameter in module.parameters(recurse=False):
            quantized = isinstance(parameter, (bnb.nn.Params4bit, bnb.nn.Int8Params))
            if parameter.is_floating_point() and not quantized:
                parameter.data = parameter.data.to(dtype)
    return model


def replace_with_dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """Put a plain nn.Linear with bitsandbytes' dequantized weight in the place of each bitsandbytes layer of `model`.

    The layers must not have run on a CPU yet: bitsandbytes rounds their scales to bfloat16 there.
    """
    import bitsandbytes as bnb

    for name, layer in list(model.named_modules()):
        if isinstance(layer, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            model.set_submodule(name, _plain_linear(layer, model.dtype))
    # The layers are plain now: nothing may treat the model as quantized.
    model.hf_quantizer = None
    return model


def _plain_linear(layer: nn.Module, dtype: torch.dtype) -> nn.Linear:
    import bitsandbytes as bnb

    weight = layer.weight
    if isinstance(layer, bnb.nn.Linear4bit):
        state = weight.quant_state
        if state.nested and state.state2.absmax.dtype != torch.float32:
            raise LoadError("the second-level scales are not float32; load the layers afresh")
        state.dtype = torch.float32
        values = bnb.functional.dequantize_4bit(weight.data, state)
    else:
        scales = layer.state.SCB if weight.SCB is None else weight.SCB
        values = bnb.functional.int8_vectorwise_dequant(weight.data, scales)
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(values.to(dtype), requires_grad=False)
    plain.bias = layer.bias
    return plain

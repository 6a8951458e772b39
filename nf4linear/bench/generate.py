"""Tokens a second of whole models: 16 bit, bitsandbytes and ours, eager and compiled with a static cache.

The model is a folder or a name on the hub, or random: the shape of Llama-3-8B with random codes, built in kernel order
on the GPU, so that nothing is downloaded and no 16-bit copy of it ever exists (except in the 16-bit row itself).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..formats import FourBitSpec
from ..generation import peak_memory, reset_peak_memory
from ..linear import PackedLinear
from ..patch import unpatch_model
from .gpu import Row
from .record import made_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATIONS = ("16-bit", "bitsandbytes", "nf4linear")
RANDOM_MODEL = "llama-3-8b-shape"
REPEATS = 3

Loader = Callable[[str], "PreTrainedModel"]


def sweep(
    name: str, load: Loader, impls: Sequence[str], compiled: Sequence[bool], prompts: Sequence[int], new: int
) -> Iterator[Row]:
    """A row for each implementation, way of running and length of the prompt; `load(impl)` gives a fresh model for
    each implementation and way."""
    for impl in impls:
        for compile in compiled:
            model = load(impl)
            for prompt in prompts:
                torch._dynamo.reset()
                yield {"op": "generate", "model": name, "impl": impl} | _measure(model, compile, prompt, new)
            del model
            gc.collect()
            torch.cuda.empty_cache()


@torch.inference_mode()
def _measure(model: PreTrainedModel, compile: bool, prompt: int, new: int) -> Row:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(10, vocabulary, (1, prompt), device=model.device, generator=_generator(model.device))
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "pad_token_id": 0,
    }
    if compile:
        options["cache_implementation"] = "static"
    model.generate(ids, **options)  # warms up, and compiles
    reset_peak_memory(model)
    runs = [_run(model, ids, options) for _ in range(REPEATS)]
    return {
        "batch": 1,
        "prompt": prompt,
        "new_tokens": new,
        "compile": compile,
        "ttft_ms": statistics.median(first for first, _ in runs) * 1e3,
        "tok_s": (new - 1) / statistics.median(rest for _, rest in runs),
        "peak_GiB": (peak_memory(model) or 0) / 2**30,
    }


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


class _Clock:
    """A transformers streamer that only notes when tokens arrive."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.arrivals.append(time.perf_counter())

    def end(self) -> None:
        pass


def _run(model: PreTrainedModel, ids: torch.Tensor, options: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first new token, and from there to the last."""
    clock = _Clock()
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(ids, streamer=clock, **options)
    _, first, *_, last = clock.arrivals  # the prompt comes before the first
    return first - start, last - first


# ---- the random model ------------------------------------------------------------------------------------------------


def random_model(impl: str, layers: int = 32) -> PreTrainedModel:
    """Llama-3-8B's shape (or fewer layers of it) on the GPU in bfloat16; body layers NF4 but for "16-bit"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
        bos_token_id=0, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            spec = FourBitSpec("nf4", module.out_features, module.in_features)
            model.set_submodule(name, _random_layer(spec, generator))
    for module in list(model.modules()):
        if not isinstance(module, PackedLinear):
            _fill(module, generator)
    if impl == "bitsandbytes":
        unpatch_model(model)
    elif impl == "16-bit":
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                model.set_submodule(name, module.to_linear(torch.bfloat16))
    return model


def _random_layer(spec: FourBitSpec, generator: torch.Generator) -> PackedLinear:
    layer = PackedLinear.from_spec(spec, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.qweight.random_(0, 256, generator=generator)
    layer.absmax_q.random_(0, 256, generator=generator)
    # Weights of the size that keeps activations as they are: about 1 / sqrt(k).
    layer.nested_absmax.fill_(0.5 / spec.k**0.5)
    layer.nested_offset.fill_(2.0 / spec.k**0.5)
    return layer


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Give the parameters and buffers that `module` itself holds memory and values."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
        value = value.normal_(0, 0.02, generator=generator) if value.dim() > 1 else value.fill_(1)
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    if any(True for _ in module.buffers(recurse=False)):
        # Rotary tables: made again on the GPU by the module's own constructor.
        fresh = type(module)(module.config, device="cuda")
        for name, buffer in fresh.named_buffers(recurse=False):
            setattr(module, name, buffer)


def markdown(record: Row) -> str:
    lines = [
        f"# Generation on {record['machine']}",
        "",
        made_by(record),
        "",
        f"Batch 1, greedy, transformers' `generate`; medians of {REPEATS} runs after a first one. *Compiled*: static "
        "cache, decode step under torch.compile.",
        "",
        "| model | implementation | loop | prompt | new tokens | first token ms | tokens/s | peak GiB |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        loop = "compiled" if row["compile"] else "eager"
        lines.append(
            f"| {row['model']} | {row['impl']} | {loop} | {row['prompt']} | {row['new_tokens']} | {row['ttft_ms']:.1f} "
            f"| {row['tok_s']:.1f} | {row['peak_GiB']:.2f} |"
        )
    return "\n".join(lines) + "\n"

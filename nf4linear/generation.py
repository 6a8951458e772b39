"""Text generation with timing: one prompt in, streamed text out, prefill and decode measured apart.

Works on any transformers causal language model, patched or not. transformers is imported when a function runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `None` leaves a choice to the model's own generation config.

    temperature 0 is greedy decoding. `seed` fixes the draws (on one device and one version of torch).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more; got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1]; got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be 1 or more; got {self.top_k}")

    def generate_options(self) -> dict[str, Any]:
        """The keyword arguments of transformers' `generate` that say the same."""
        if self.temperature == 0:
            # The other three are reset too: a model's own sampling defaults would only draw warnings.
            return {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        return chosen | {"do_sample": True} if chosen else {}


@dataclass(frozen=True)
class Generation:
    """What `generate` returns. Times are seconds of wall clock, `peak_bytes` is what `peak_memory` says."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int | None

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over the time to the first new token."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """New tokens after the first over the time they took; None when there were none."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else None


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool | None = None, system: str | None = None
) -> torch.Tensor:
    """Token ids [1, T] int64 of a prompt, through the chat template (`chat=True`), as it is (`False`), or through the
    template where the tokenizer has one (`None`).

    Raises ValueError for a prompt that is empty or no UTF-8 text, or when a template is asked for (by `chat` or by
    `system`) and there is none.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of another encoding, from a shell or a pipe
        raise ValueError(f"the prompt is no UTF-8 text ({error})") from error
    template = bool(getattr(tokenizer, "chat_template", None))
    if (chat or system) and not template:
        raise ValueError("this tokenizer has no chat template; generate from the raw prompt, without a system message")
    if template and chat is not False:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    else:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty: it has no tokens")
    return ids.long()


class _TimedStreamer:
    """A transformers streamer that notes when each token arrives and writes text as words become final.

    transformers hands over the prompt first, then every new token as soon as the host has it; the copy to the host has
    already waited for the device, so the clock needs no synchronisation of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None] | None) -> None:
        from transformers import TextStreamer

        self.arrivals: list[float] = []
        self._prompt_seen = False
        self._text = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._text.on_finalized_text = lambda text, stream_end=False: write(text) if write and text else None

    def put(self, token_ids: torch.Tensor) -> None:
        if self._prompt_seen:
            self.arrivals.append(time.perf_counter())
        self._prompt_seen = True
        self._text.put(token_ids)

    def end(self) -> None:
        self._text.end()


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    chat: bool | None = None,
    system: str | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    write: Callable[[str], None] | None = None,
    static_cache: bool = False,
) -> Generation:
    """Generate a continuation of `prompt`; `write` receives the text piece by piece while it comes.

    `static_cache` lets transformers compile the decode step (on accelerators, where the model's quantizer allows it);
    one silent generation then runs first, so that compilation is not in the times.
    Raises ValueError where prompt and new tokens do not fit into the model's positions, and as `encode_prompt`.
    """
    ids = encode_prompt(tokenizer, prompt, chat=chat, system=system).to(model.device)
    _check_length(model, ids.shape[1], max_new_tokens)
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": max_new_tokens,
        "pad_token_id": _pad_token(model, tokenizer),
        **sampling.generate_options(),
    }
    if static_cache:
        options["cache_implementation"] = "static"
        model.generate(ids, **options)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    reset_peak_memory(model)
    streamer = _TimedStreamer(tokenizer, write)
    start = time.perf_counter()
    tokens = model.generate(ids, streamer=streamer, **options)[0, ids.shape[1] :].tolist()
    first, last = streamer.arrivals[0], streamer.arrivals[-1]
    return Generation(
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        token_ids=tokens,
        prompt_tokens=ids.shape[1],
        prefill_seconds=first - start,
        decode_seconds=last - first,
        peak_bytes=peak_memory(model),
    )


def _check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more; got {max_new_tokens}")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and prompt_tokens + max_new_tokens > positions:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens and {max_new_tokens} new ones are asked for, "
            f"but the model has {positions} positions; shorten the prompt or ask for fewer tokens"
        )


def _pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Any pad token will do for a single sequence; naming one keeps transformers from warning about it."""
    eos = model.generation_config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    return next((token for token in (tokenizer.pad_token_id, eos, tokenizer.eos_token_id) if token is not None), None)


def reset_peak_memory(model: torch.nn.Module) -> None:
    """Start a new measurement on the CUDA devices of a model; a process' peak on the CPU cannot be reset."""
    for device in _cuda_devices(model):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(model: torch.nn.Module) -> int | None:
    """Bytes: the most that torch had allocated on the model's CUDA devices since the reset, weights included; for a
    model on the CPU the most that this process ever held resident; None where the platform does not tell."""
    if devices := _cuda_devices(model):
        return sum(torch.cuda.max_memory_allocated(device) for device in devices)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cuda_devices(model: torch.nn.Module) -> set[torch.device]:
    return {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}

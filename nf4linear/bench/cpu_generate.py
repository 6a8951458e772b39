"""Tokens a second of a small language model on this machine's CPU: 16 bit, bitsandbytes and ours, in paired rounds.

All variants are made from one 16-bit folder and stay loaded; a round lets each generate once from the same prompt, in
random order. Numbers are medians over rounds.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from .. import patch
from ..generation import Generation, Sampling, generate
from . import cpu_report
from .record import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEER = "bitsandbytes NF4"
PROMPT = "Once upon a time, in a town by the sea, there lived"


def variants(folder: str) -> dict[str, Callable[[], PreTrainedModel]]:
    """Name -> a function that loads the model; names beginning with nf4linear are ours."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def load(**options: object) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {
        "torch bf16": load,
        PEER: lambda: load(quantization_config=nf4, device_map="cpu"),
        "bitsandbytes int8": lambda: load(quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="cpu"),
        "nf4linear NF4": lambda: patch.patch_model(load(), progress=False),
        "nf4linear W8": lambda: patch.patch_model(load(), format="w8_s8", progress=False),
        "nf4linear NF4, W8 head": lambda: patch.patch_model(load(), lm_head="w8", progress=False),
    }


def rounds(folder: str, new_tokens: int, count: int) -> Iterator[dict[str, Generation]]:
    """What every variant made, for `count` rounds after one that warms up."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = {name: load() for name, load in variants(folder).items()}
    order = list(models)
    for number in range(count + 1):
        random.shuffle(order)
        sampling = Sampling(temperature=0)
        done = {
            name: generate(models[name], tokenizer, PROMPT, chat=False, max_new_tokens=new_tokens, sampling=sampling)
            for name in order
        }
        if number:
            yield {name: done[name] for name in models}


def rows_of(model: str, done: list[dict[str, Generation]]) -> list[Row]:
    """A row a variant, from all rounds."""

    def median(name: str, value: Callable[[Generation], float]) -> float:
        return statistics.median(value(each[name]) for each in done)

    return [
        {
            "op": "generate",
            "model": model,
            "impl": name,
            "batch": 1,
            "prompt": done[0][name].prompt_tokens,
            "new_tokens": median(name, lambda each: each.new_tokens),
            "compile": False,
            "rounds": len(done),
            "ttft_ms": median(name, lambda each: each.prefill_seconds) * 1e3,
            "tok_s": median(name, lambda each: each.decode_tokens_per_second),
            "over_bitsandbytes": statistics.median(
                each[name].decode_tokens_per_second / each[PEER].decode_tokens_per_second for each in done
            ),
        }
        for name in done[0]
    ]


def markdown(record: Row) -> str:
    lines = [
        f"# Generation on a CPU ({record['machine']})",
        "",
        cpu_report.made_by(record),
        "",
        f"Model {record['rows'][0]['model']}, batch 1, prompt of {record['rows'][0]['prompt']} tokens, greedy; medians "
        f"of {record['rows'][0]['rounds']} paired rounds. The output embedding stays 16-bit but for the last row.",
        "",
        "| variant | tokens/s | over bitsandbytes NF4 | first token, ms |",
        "|---|--:|--:|--:|",
    ]
    for row in record["rows"]:
        lines.append(f"| {row['impl']} | {row['tok_s']:.1f} | {row['over_bitsandbytes']:.2f}x | {row['ttft_ms']:.0f} |")
    return "\n".join(lines) + "\n"

"""Tokens a second of a small language model on this machine's CPU: 16 bit, bitsandbytes and ours, in paired rounds.

    python -m nf4linear.bench.cpu_generate MODEL_FOLDER [--threads 2] [--out benchmarks/results/cpu-generate.json]

All variants are made from one 16-bit folder and stay loaded; a round lets each generate once from the same prompt, in
random order. Numbers are medians over rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import native, patch
from ..generation import Generation, Sampling, generate
from . import cpu_report
from .cpu import Row, head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        "bitsandbytes NF4": lambda: load(quantization_config=nf4, device_map="cpu"),
        "bitsandbytes int8": lambda: load(quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="cpu"),
        "nf4linear NF4": lambda: patch.patch_model(load(), progress=False),
        "nf4linear W8": lambda: patch.patch_model(load(), format="w8_s8", progress=False),
        "nf4linear NF4, W8 head": lambda: patch.patch_model(load(), lm_head="w8", progress=False),
    }


def run(folder: str, new_tokens: int, rounds: int) -> list[Row]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = {name: load() for name, load in variants(folder).items()}
    results: dict[str, list[Generation]] = {name: [] for name in models}
    order = list(models)
    for number in range(rounds + 1):  # the first is a warm-up
        random.shuffle(order)
        for name in order:
            done = generate(
                models[name], tokenizer, PROMPT, chat=False, max_new_tokens=new_tokens, sampling=Sampling(temperature=0)
            )
            if number:
                results[name].append(done)
        print(f"round {number} of {rounds}", flush=True)
    peer = [done.decode_tokens_per_second for done in results["bitsandbytes NF4"]]
    return [
        {
            "op": "generate",
            "model": Path(folder).name,
            "impl": name,
            "batch": 1,
            "prompt": done[0].prompt_tokens,
            "new_tokens": statistics.median(each.new_tokens for each in done),
            "compile": False,
            "ttft_ms": statistics.median(each.prefill_seconds for each in done) * 1e3,
            "tok_s": statistics.median(each.decode_tokens_per_second for each in done),
            "over_bitsandbytes": statistics.median(
                each.decode_tokens_per_second / theirs for each, theirs in zip(done, peer, strict=True)
            ),
        }
        for name, done in results.items()
    ]


def markdown(record: Row) -> str:
    lines = [
        f"# Generation on a CPU ({record['machine']})",
        "",
        cpu_report.made_by(record),
        "",
        f"Model {record['rows'][0]['model']}, batch 1, prompt of {record['rows'][0]['prompt']} tokens, greedy; medians "
        "of paired rounds. The output embedding stays 16-bit but for the last row.",
        "",
        "| variant | tokens/s | over bitsandbytes NF4 | first token, ms |",
        "|---|--:|--:|--:|",
    ]
    for row in record["rows"]:
        lines.append(f"| {row['impl']} | {row['tok_s']:.1f} | {row['over_bitsandbytes']:.2f}x | {row['ttft_ms']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a 16-bit causal language model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu-generate.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not native.library("cpu"):
        raise SystemExit(f"nothing to measure: {native.library('cpu').why}")
    rows = run(options.model, options.new_tokens, options.rounds)
    command = f"python -m nf4linear.bench.cpu_generate {Path(options.model).name} --threads {options.threads}"
    cpu_report.write(head(command, ("torch", "transformers", "bitsandbytes")) | {"rows": rows}, options.out, markdown)


if __name__ == "__main__":
    main()

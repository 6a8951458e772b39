"""nf4linear perplexity: how well a model predicts a text, alone or beside its other variants."""

from __future__ import annotations

import gc
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import perplexity as scoring
from ..patch_report import weight_bytes
from .loading import LoadError, ModelSource
from .options import DeviceOption, DtypeOption, FormatOption, ModelArgument
from .output import errors_to_exit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATASETS = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")}


@dataclass(frozen=True)
class Row:
    """One variant's score; bytes are those of all weights, statistics included."""

    variant: str
    dtype: str
    model_bytes: int
    score: scoring.Perplexity


TextOption = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="UTF-8 text file to score.")]
DatasetOption = Annotated[str | None, typer.Option(help=f"Or a data set from the hub: {', '.join(DATASETS)}.")]
WindowOption = Annotated[int, typer.Option(min=2, help="Tokens the model sees at a time.")]
StrideOption = Annotated[int | None, typer.Option(help="Tokens scored a window.", show_default="half the window")]
TokensOption = Annotated[int | None, typer.Option(min=2, help="Read only this many tokens.", show_default="all")]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Beside 16-bit, bitsandbytes and bitsandbytes' exact dequantized weights.")
]
BaseOption = Annotated[str | None, typer.Option(help="16-bit model that MODEL was made from, for --compare.")]
JsonOption = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Also write the numbers here.")]


def perplexity(
    model: ModelArgument,
    text: TextOption = None,
    dataset: DatasetOption = None,
    window: WindowOption = 1024,
    stride: StrideOption = None,
    max_tokens: TokensOption = None,
    compare: CompareOption = False,
    base: BaseOption = None,
    json_file: JsonOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    format: FormatOption = "nf4",
) -> None:
    """Perplexity of a text by sliding window, with a standard error."""
    console = Console()
    with errors_to_exit(Console(stderr=True)):
        source = ModelSource(model, device, dtype, format, base)
        stride = window // 2 if stride is None else stride
        # Whatever can be wrong is looked at before a model is loaded.
        scoring.check_window(window, stride, source.config())
        if json_file is not None:
            _check_writable(json_file)
        token_ids = _tokenize(source.tokenizer(), _read_text(text, dataset), max_tokens)
        scoring.check_length(token_ids.numel())
        variants = source.variants() if compare else ["nf4linear"]
        rows = [_score(source, variant, token_ids, window, stride) for variant in variants]
        if json_file is not None:
            _write_json(json_file, _report(rows, source, str(text or dataset)))
        console.print(_table(rows, source))
        if compare and "16-bit" not in variants:
            console.print("no 16-bit row: name the model that this one was made from with --base", style="dim")


def _read_text(text: Path | None, dataset: str | None) -> str:
    if (text is None) == (dataset is None):
        raise LoadError("name what to score: --text FILE or --dataset wikitext (one of the two)")
    if text is not None:
        try:
            return text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise LoadError(f"{text}: is no UTF-8 text ({error})") from error
    if dataset not in DATASETS:
        raise LoadError(f"--dataset {dataset}: known are {', '.join(DATASETS)}; other texts go through --text FILE")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise LoadError(f"--dataset {dataset} needs the datasets package: pip install 'nf4linear[datasets]'") from error
    path, name, split = DATASETS[dataset]
    # The customary form of this benchmark: all lines of the test split in one text.
    return "\n\n".join(load_dataset(path, name, split=split)["text"])


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int | None) -> torch.Tensor:
    # The text is longer than the model's positions on purpose; verbose=False keeps the tokenizer from saying so.
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0, :max_tokens]


def _score(source: ModelSource, variant: str, token_ids: torch.Tensor, window: int, stride: int) -> Row:
    gc.collect()  # the previous variant's model
    model = source.load(variant)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(variant, total=token_ids.numel() - 1)
        score = scoring.perplexity(
            model, token_ids, window=window, stride=stride, progress=lambda tokens: progress.advance(task, tokens)
        )
    dtype = str(model.dtype).removeprefix("torch.")
    return Row(variant, dtype, weight_bytes(model), score)


def _table(rows: list[Row], source: ModelSource) -> Table:
    first = rows[0].score
    title = (
        f"{source.path}: {first.tokens} tokens, window {first.window}, stride {first.stride}, {rows[0].dtype}\n"
        "perplexity ± standard error; changes in percent, paired"
    )
    # What quantization costs, and what this package's layers add to it.
    baselines = [row for row in rows if row.variant in ("16-bit", "exact")]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in ("MB", "perplexity", *(f"vs. {row.variant}" for row in baselines)):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        score = row.score
        table.add_row(
            row.variant,
            f"{row.model_bytes / 1e6:.1f}",
            f"{score.perplexity:.3f} ± {score.standard_error:.3f}",
            *(_change(row, baseline) for baseline in baselines),
        )
    return table


def _change(row: Row, baseline: Row) -> str:
    if row is baseline or row.variant == "16-bit":
        return ""
    change, error = row.score.relative_to(baseline.score)
    return f"{change * 100:+.2f} ± {error * 100:.2f}"


def _report(rows: list[Row], source: ModelSource, text: str) -> dict[str, Any]:
    import transformers

    def fields(row: Row) -> dict[str, Any]:
        change, error = row.score.relative_to(rows[0].score)
        return {
            "variant": row.variant,
            "dtype": row.dtype,
            "model_bytes": row.model_bytes,
            "perplexity": _json_number(row.score.perplexity),
            "standard_error": _json_number(row.score.standard_error),
            "relative_change": _json_number(change),
            "relative_change_error": _json_number(error),
            "seconds": row.score.seconds,
        }

    score = rows[0].score
    return {
        "model": source.path,
        "base": source.base,
        "text": text,
        "tokens": score.tokens,
        "window": score.window,
        "stride": score.stride,
        "device": str(source.device or source.device_map[""]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [fields(row) for row in rows],
    }


def _json_number(value: float) -> float | None:
    """JSON has no NaN or infinity, such as the standard error of a text of three tokens."""
    return value if math.isfinite(value) else None


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise LoadError(f"--json {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise LoadError(f"--json {path}: cannot be written there; choose another place")


def _write_json(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)

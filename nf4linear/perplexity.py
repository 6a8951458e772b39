"""Perplexity of a causal language model on a text: sliding window, with a standard error.

Every token but the first of the text is scored exactly once. A window of `window` tokens moves by `stride`; of each
window only the tokens that no earlier window scored count, the rest is their context, so that from the second window
on every scored token has at least `window - stride` tokens before it. Losses are natural logarithms, taken in float32
from the model's logits.

Standard error. Losses of neighbouring tokens are correlated, so the plain sd / sqrt(T) is too small. The T losses are
cut into floor(sqrt(T)) runs of consecutive tokens; the variance of the run means over the number of runs estimates the
variance of the mean loss (the method of non-overlapping batch means), and perplexity = exp(mean) carries it over to
first order: se(perplexity) = perplexity * se(mean). Two models scored on the same tokens are compared pairwise: the
same estimate on the differences of their losses, which is far smaller than either model's own error.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Rows of logits that are turned into float32 losses at a time: bounds the extra memory at this times the vocabulary.
_LOSS_ROWS = 256


@dataclass(frozen=True)
class Perplexity:
    """Scores of one model on one text: `losses` float32 [T] on the CPU, one for each token from the second on."""

    losses: Tensor
    window: int
    stride: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.losses.numel()

    @property
    def perplexity(self) -> float:
        return math.exp(mean_and_error(self.losses)[0])

    @property
    def standard_error(self) -> float:
        mean, error = mean_and_error(self.losses)
        return math.exp(mean) * error

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def relative_to(self, baseline: Perplexity) -> tuple[float, float]:
        """(perplexity / baseline's - 1, its standard error), from the paired losses.

        Raises ValueError unless both scored the same number of tokens.
        """
        if self.tokens != baseline.tokens:
            raise ValueError(f"scored {self.tokens} tokens here and {baseline.tokens} there; compare on the same text")
        mean, error = mean_and_error(self.losses - baseline.losses)
        return math.expm1(mean), math.exp(mean) * error


def mean_and_error(losses: Tensor) -> tuple[float, float]:
    """Mean of `losses` [T] and its standard error by batch means (see the top of the file); NaN error for T < 4."""
    losses = losses.double()
    runs = math.isqrt(losses.numel())
    if runs < 2:
        return losses.mean().item(), math.nan
    length = losses.numel() // runs
    run_means = losses[: runs * length].view(runs, length).mean(dim=1)
    return losses.mean().item(), (run_means.std() / math.sqrt(runs)).item()


def check_window(window: int, stride: int, config: PreTrainedConfig) -> None:
    """Raises ValueError for a window and stride that a model of this config cannot be scored with."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and window > positions:
        raise ValueError(f"window is {window} tokens, but the model has {positions} positions; choose a smaller window")
    if window < 2 or not 1 <= stride < window:
        raise ValueError(f"need window >= 2 and 1 <= stride < window; got window {window}, stride {stride}")


def check_length(tokens: int) -> None:
    """Raises ValueError for a text of which nothing can be scored."""
    if tokens < 2:
        raise ValueError(f"the text has {tokens} tokens; at least 2 are needed to score one")


def windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, scored_from) of each window over `tokens` tokens: positions scored_from..end-1 are new.

    The arguments are those that check_window and check_length let pass.
    """
    begin, scored = 0, 1
    while scored < tokens:
        end = min(begin + window, tokens)
        yield begin, end, scored
        begin, scored = begin + stride, end


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel,
    token_ids: Tensor,
    *,
    window: int = 1024,
    stride: int = 512,
    progress: Callable[[int], None] | None = None,
) -> Perplexity:
    """Score a text, `token_ids` int64 [T], with a causal language model.

    `progress` is called with the number of tokens scored since the last call. Raises ValueError for a window, stride or
    text that check_window or check_length refuses.
    """
    check_window(window, stride, model.config)
    token_ids = token_ids.reshape(-1)
    check_length(token_ids.numel())
    trims_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    losses = []
    start = time.perf_counter()
    for begin, end, scored in windows(token_ids.numel(), window, stride):
        ids = token_ids[begin:end].to(model.device)
        # The logits of position p - 1 score token p: those from `scored - 1` on are wanted, the last one is not.
        kept = end - scored + 1
        options = {"logits_to_keep": kept} if trims_logits else {}
        logits = model(ids[None], use_cache=False, **options).logits[0, -kept:-1]
        losses.append(_losses(logits, ids[scored - begin :]).cpu())
        if progress:
            progress(end - scored)
    return Perplexity(torch.cat(losses), window, stride, time.perf_counter() - start)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """float32 [T] cross entropies of `logits` [T, V] of any float dtype against `targets` [T]."""
    parts = zip(logits.split(_LOSS_ROWS), targets.to(logits.device).split(_LOSS_ROWS), strict=True)
    return torch.cat([torch.nn.functional.cross_entropy(rows.float(), ids, reduction="none") for rows, ids in parts])

"""How far one output is from the reference: the report's four figures, and the number of bits that differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PASS_BELOW = 1e-2  # relative mean absolute error
HEADER = ("MAE", "max error", "RMSE", "relative MAE", f"below {PASS_BELOW:g}", "values that differ")


@dataclass(frozen=True)
class Errors:
    mae: float
    max_error: float
    rmse: float
    relative_mae: float  # mean |difference| / mean |reference|
    different: int  # values whose bits differ

    @property
    def passed(self) -> bool:
        """The report's verdict."""
        return self.relative_mae < PASS_BELOW

    @property
    def exact(self) -> bool:
        return self.different == 0

    def cells(self) -> tuple[str, ...]:
        """Table cells under HEADER."""
        figures = (self.mae, self.max_error, self.rmse, self.relative_mae)
        return (*(f"{v:.2e}" for v in figures), "PASS" if self.passed else "FAIL", str(self.different))


def compare(got: Tensor, wanted: Tensor) -> Errors:
    """Errors of `got` against `wanted`, matrices of one shape and dtype. NaN anywhere fails."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise ValueError(f"cannot compare {got.dtype} {list(got.shape)} with {wanted.dtype} {list(wanted.shape)}")
    difference = (got.double() - wanted.double()).abs()
    mae, scale = difference.mean().item(), wanted.double().abs().mean().item()
    relative = mae / scale if scale else mae
    bits = torch.int32 if got.element_size() == 4 else torch.int16
    return Errors(
        mae=mae,
        max_error=difference.max().item(),
        rmse=difference.square().mean().sqrt().item(),
        relative_mae=relative,
        different=int((got.view(bits) != wanted.view(bits)).sum()),
    )

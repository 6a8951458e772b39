"""The first-use check without a GPU: the CPU library stands in for kernels, of which a test damages one."""

import itertools
import re

import pytest
import torch

from nf4linear import native, selfcheck
from nf4linear.formats import EightBitSpec, FourBitSpec

SPECS = list(itertools.chain(*selfcheck.SPECS.values()))
CAPACITIES = (1, 8, 16, 128, 10**6)  # most tokens of each shape
TABLE_TOKENS = 32


class StandIn:
    """A library with shapes of CAPACITIES, of which the launch table uses some up to TABLE_TOKENS."""

    def __init__(self, damaged: tuple[int, int] | None = None):
        self.damaged = damaged  # shape and cut
        self.calls: list[tuple[int, int, int]] = []  # shape (-1: the table's), cut, tokens
        self._cpu = native.open_library("cpu")
        assert self._cpu, self._cpu.why
        self.dequantize = self._cpu.dequantize

    def linear(self, weight, x, bias, y, flags):
        shape, cut = (flags >> 8 & 255) - 1, flags >> 16 & 255
        capacity = TABLE_TOKENS if shape < 0 else dict(enumerate(CAPACITIES)).get(shape, 0)
        if len(x) > capacity:
            return False
        self.calls.append((shape, cut, len(x)))
        self._cpu.linear(weight, x, bias, y)
        if (shape, cut) == self.damaged:
            y[:, -1] *= 1.2
        return True


def worst(library, spec):
    product = selfcheck.Product(library, spec, torch.device("cpu"), torch.bfloat16)
    return float(torch.stack(product.errors()).max())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_right_kernels_pass(spec):
    assert 0 < worst(StandIn(), spec) < selfcheck.TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_default_dtype_that_the_user_has_set_changes_nothing(spec, default):
    torch.set_default_dtype(default)
    try:
        assert 0 < worst(StandIn(), spec) < selfcheck.TOLERANCES[torch.bfloat16]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", selfcheck.SPECS, ids=lambda kind: kind.__name__)
def test_what_is_wrong_is_said_and_what_cannot_be_launched_too(kind):
    def problem(library):
        return selfcheck._problem(library, torch.device("cpu"), torch.bfloat16, kind)

    assert problem(StandIn()) is None
    assert re.fullmatch(r"give wrong results \(relative error \d.*\)", problem(StandIn(damaged=(2, 1))))
    refusing = StandIn()

    def refuse(*args):
        raise native.NativeError("no room for a cluster")

    refusing.linear = refuse
    assert problem(refusing) == "cannot be launched (no room for a cluster)"


def test_every_shape_is_tried_nearly_full_and_with_both_cuts():
    library = StandIn()
    worst(library, SPECS[0])
    tried = set(library.calls)
    for shape, capacity in enumerate(CAPACITIES):
        tokens = next(tokens for tokens in selfcheck.TOKENS if tokens <= capacity)
        assert tokens > min(capacity, 300) // 2
        assert {(shape, cut, tokens) for cut in selfcheck.CUTS} <= tried
    assert {tokens for shape, _, tokens in tried if shape < 0} == {t for t in selfcheck.TOKENS if t <= TABLE_TOKENS}


@pytest.mark.parametrize("damaged", [(-1, 0), *itertools.product(range(len(CAPACITIES)), selfcheck.CUTS)], ids=str)
def test_one_wrong_column_of_one_shape_is_found(damaged):
    assert worst(StandIn(damaged), SPECS[1]) > selfcheck.TOLERANCES[torch.bfloat16]


def test_a_result_that_is_not_written_is_found(monkeypatch):
    library = StandIn()
    monkeypatch.setattr(library._cpu, "linear", lambda *args: True)
    assert not worst(library, SPECS[0]) <= 1  # NaN


def test_the_weights_cover_what_formats_can_be():
    four = [s for s in SPECS if isinstance(s, FourBitSpec)]
    eight = [s for s in SPECS if isinstance(s, EightBitSpec)]
    assert {s.format for s in four} == {"nf4", "fp4"} and {s.format for s in eight} == {"w8_s8", "w8_u8"}
    assert {s.double_quant for s in four} == {True, False} and len({s.blocksize for s in four}) > 1
    assert {s.group_size for s in eight} == {None, 64, 128}
    assert all(s.layout != "flat" for s in SPECS)

"""The first-use check without a GPU: the CPU library stands in for kernels, of which a test damages one."""

import contextlib
import itertools
import re
from types import SimpleNamespace

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


def test_every_shape_is_tried_nearly_full_and_with_every_cut():
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


# ---- verdicts, on a GPU that is not there ----------------------------------------------------------------------------


class Gpu:
    """What the check asks of torch.cuda, and each time that it ran: on which device, for which dtype and width."""

    def __init__(self, monkeypatch):
        self.capturing = False
        self.problem = None
        self.runs: list[tuple[torch.device, torch.dtype, type]] = []
        self.current: list[int] = []
        monkeypatch.setattr(selfcheck, "_verdicts", {})
        monkeypatch.setattr(selfcheck, "_problem", self._problem)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Test GPU {device}")

    @contextlib.contextmanager
    def _device(self, device):
        self.current.append(device)
        yield
        self.current.pop()

    def _problem(self, library, device, dtype, kind):
        assert self.current == [device.index] and not torch.is_grad_enabled()
        self.runs.append((device, dtype, kind))
        return self.problem

    @staticmethod
    def allowed(spec=SPECS[0], dtype=torch.bfloat16, device=0):
        return selfcheck.fused_allowed(SimpleNamespace(path="/lib/nf4l.so"), device, dtype, spec)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.mark.parametrize("problem", [None, "give wrong results (relative error 1.0e+00)"])
@pytest.mark.filterwarnings("ignore:nf4linear. fused")
def test_a_verdict_is_kept_for_a_device_a_dtype_and_a_width(gpu, problem):
    gpu.problem = problem
    four, eight = (specs[0] for specs in selfcheck.SPECS.values())
    calls = list(itertools.product((four, eight), selfcheck.TOLERANCES, (0, 1)))
    for _ in range(2):
        assert [gpu.allowed(*call) for call in calls] == [problem is None] * len(calls)
        assert gpu.runs == [(torch.device("cuda", device), dtype, type(spec)) for spec, dtype, device in calls]
    assert gpu.allowed(selfcheck.SPECS[FourBitSpec][1]) == (problem is None)  # another weight of a width that is known
    gpu.capturing = True
    assert gpu.allowed() == (problem is None)
    assert len(gpu.runs) == len(calls)


def test_a_stream_that_captures_is_not_checked_and_nothing_is_kept(gpu):
    gpu.capturing = True
    assert not gpu.allowed() and not gpu.runs
    gpu.capturing = False
    assert gpu.allowed() and len(gpu.runs) == 1


def test_float32_is_never_fused(gpu):
    assert not gpu.allowed(dtype=torch.float32) and not gpu.runs


@pytest.mark.parametrize(("kind", "width"), [(FourBitSpec, "4-bit"), (EightBitSpec, "8-bit")])
def test_one_warning_says_what_is_wrong_where_and_what_follows(gpu, kind, width):
    gpu.problem = "cannot be launched (no room)"
    with pytest.warns(UserWarning) as said:
        for _ in range(2):
            assert not gpu.allowed(selfcheck.SPECS[kind][0], torch.float16, 1)
    assert [str(warning.message) for warning in said] == [
        f"nf4linear: fused {width} kernels of /lib/nf4l.so cannot be launched (no room) on "
        "Test GPU 1 (cuda:1, torch.float16); dequantize + GEMM is used instead, which is slower. "
        "Please report this with the output of python -m torch.utils.collect_env."
    ]


def test_kernels_that_are_right_are_not_spoken_of(gpu, recwarn):
    assert gpu.allowed() and not recwarn.list

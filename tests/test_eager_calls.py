"""The short way of eager CUDA calls, without a GPU: the CPU library stands in for the CUDA one, on CPU tensors."""

import pytest
import torch
from torch import nn

from nf4linear import NF4Linear, W8Linear, eager, native, ops

ERROR = -1001
N, K = 200, 512


class StandIn:
    """A CUDA library whose fused kernels take up to `most_tokens`; the stream of a call is the number of threads."""

    def __init__(self, most_tokens: int, status: int = native.USE_GEMM):
        self.most_tokens, self.status = most_tokens, status
        self.asked: list[int] = []  # tokens of the calls that a kernel was asked for
        self.dequantized = 0
        self._cpu = native.open_library("cpu")
        assert self._cpu, self._cpu.why

    def workspace_bytes(self, weight: native.Weight, args: native.LinearArgs) -> int:
        return 256

    def launch(self, weight: int, args: bytes, stream: int) -> int:
        tokens = native.LinearArgs.from_buffer_copy(args).m
        self.asked.append(tokens)
        return self._cpu.launch(weight, args, stream) if tokens <= self.most_tokens else self.status

    def launch_dequantize(self, weight: int, dtype: int, out: int, stream: int) -> int:
        self.dequantized += 1
        return self._cpu._dequantize(native.Weight.from_address(weight), dtype, out, stream)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(eager, "_current_device", lambda: -1)
    monkeypatch.setattr(eager, "_current_stream", lambda device: 1)


def make_layer(bias=True, cls=NF4Linear, **options):
    torch.manual_seed(0)
    return cls.from_linear(nn.Linear(K, N, bias=bias).bfloat16(), **options).requires_grad_(False)


def bound(layer, library):
    return eager.BoundWeight(layer.spec, library, layer._weight_arguments(), -1, torch.bfloat16)


def inputs(*shape):
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1)).bfloat16()


def by_gemm(layer, x):
    return ops._linear_gemm(x, *layer._weight_arguments(), layer.bias, *layer._spec_arguments())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(9000,), (1, 9000), (2, 3, 1400), (1, 1, 1, 8193)])
def test_long_prompts_are_the_operators_bits(bias, shape):
    layer, library = make_layer(bias), StandIn(0)
    x = inputs(*shape)
    got = bound(layer, library).linear(x, layer.bias)
    assert torch.equal(got, by_gemm(layer, x)) and got.shape == (*shape, N)
    assert library.dequantized == 1 and not library.asked


@pytest.mark.parametrize(
    ("cls", "options", "tokens"),
    [(NF4Linear, {}, 100), (W8Linear, {"group_size": 64}, 30), (W8Linear, {}, 5000)],
    ids=["nf4", "w8 groups", "w8"],
)
def test_what_a_kernel_may_take_is_asked_for_each_time(cls, options, tokens):
    layer, library = make_layer(cls=cls, **options), StandIn(0)
    weight, x = bound(layer, library), inputs(tokens)
    for _ in range(2):
        assert torch.equal(weight.linear(x, layer.bias), by_gemm(layer, x))
    few = tokens <= eager.MOST_KEPT_TOKENS  # of these the answer is remembered
    assert library.asked == [tokens] * (1 if few else 2)
    assert len(weight._calls) == few


def test_kernels_of_few_tokens_beside_prompts():
    layer, library = make_layer(), StandIn(4)
    weight = bound(layer, library)
    for tokens in (1, 9000, 4, 8, 1, 8):
        x = inputs(tokens)
        exact = torch.nn.functional.linear(x.float(), layer.dequantize(torch.float32), layer.bias.float())
        torch.testing.assert_close(weight.linear(x, layer.bias).float(), exact, rtol=2e-2, atol=2e-2)
    assert library.asked == [1, 4, 8, 1] and library.dequantized == 3


def test_an_error_is_left_to_the_operator():
    layer, library = make_layer(), StandIn(0, ERROR)
    weight = bound(layer, library)
    assert weight.linear(inputs(2), layer.bias) is None and library.dequantized == 0
    library.launch_dequantize = lambda *args: ERROR
    assert bound(layer, library).linear(inputs(9000), layer.bias) is None


def test_inputs_that_are_the_operators():
    layer, library = make_layer(), StandIn(1000)
    weight = bound(layer, library)
    assert weight.linear(inputs(9000)[:, ::2], layer.bias) is None  # not contiguous
    assert weight.linear(inputs(9000)[:, : K // 2].contiguous(), layer.bias) is None  # not K wide
    assert weight.linear(inputs(0), layer.bias) is None
    assert weight.linear(inputs(9000), layer.bias.float()) is None
    assert not library.asked and not library.dequantized

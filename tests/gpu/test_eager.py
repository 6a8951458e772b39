"""The short way of eager module calls, and the first-use check of the fused kernels."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from fused import on_hopper
from torch import nn

from nf4linear import NF4Linear, W8Linear, eager, native, ops, selfcheck

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def make_layer(bias=True, dtype=torch.bfloat16, k=512, n=200, seed=0):
    torch.manual_seed(seed)
    return NF4Linear.from_linear(nn.Linear(k, n, bias=bias).to("cuda", dtype)).requires_grad_(False)


def by_operator(layer, x):
    return ops.linear(x, *layer._weight_arguments(), layer.bias, *layer._spec_arguments())


def make_w8_layer(group_size=None, dtype=torch.bfloat16, k=512, n=200):
    torch.manual_seed(0)
    linear = nn.Linear(k, n).to("cuda", dtype)
    return W8Linear.from_linear(linear, format="w8_s8", group_size=group_size).requires_grad_(False)


@pytest.fixture
def operator_calls(monkeypatch):
    """Counts the calls that go through the operator."""
    calls = []
    monkeypatch.setattr(
        ops, "linear", lambda *args, **options: calls.append(1) or torch.ops.nf4linear.linear(*args, **options)
    )
    return calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 512), (512,), (2, 3, 512), (1, 1, 512), (32, 512), (200, 512), (1, 2000, 512), (2, 2, 50, 512)]
)
def test_plain_calls_go_past_the_operator(library, operator_calls, dtype, bias, shape):
    layer = make_layer(bias, dtype)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    got = [layer(x) for _ in range(3)]  # the first launch is a plain one
    assert not operator_calls
    want = by_operator(layer, x)
    assert all(torch.equal(y, want) for y in got) and want.shape == (*shape[:-1], 200)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize(
    ("tokens", "n", "k"), [(1, 200, 512), (4, 200, 512), (32, 200, 512), (64, 1024, 2048), (5000, 4096, 4096)]
)
def test_plain_calls_of_8_bit_layers_too(library, operator_calls, dtype, group_size, tokens, n, k):
    """Large enough to be a kernel's on Hopper: only 5000 tokens of a weight with group scales are a GEMM's there."""
    layer = make_w8_layer(group_size, dtype, k, n)
    x = torch.randn(tokens, k, device="cuda", dtype=dtype)
    got = [layer(x) for _ in range(3)]
    assert not operator_calls
    want = by_operator(layer, x)
    assert all(torch.equal(y, want) for y in got)
    # The table is made for 132 SMs; with fewer it leaves more tokens to a GEMM.
    if on_hopper(library) and torch.cuda.get_device_properties(0).multi_processor_count >= 132:
        y = torch.empty_like(want)
        weight = native.describe_weight(layer.spec, *layer._weight_arguments())
        fused = library.linear(weight, x, layer.bias, y)
        assert fused == (tokens <= 64 or not group_size)
        assert not fused or torch.equal(y, want)


def test_what_takes_the_operator(library, operator_calls):
    layer, k = make_layer(), 512
    base = torch.randn(200, k + 8, device="cuda", dtype=torch.bfloat16)
    plain = base[0, :k].clone()

    def call(x):
        operator_calls.clear()
        y = layer(x)
        assert operator_calls == [1]
        return y

    for x in (base[:4, :k], base[:1, 1 : k + 1], plain.float(), base[:0, :k]):
        assert call(x).shape == (*x.shape[:-1], 200)
    x = plain.clone().requires_grad_(True)
    call(x).sum().backward()
    assert x.grad is not None
    with torch.autocast("cuda", torch.float16):
        assert call(plain).dtype == torch.float16
    with torch.utils._python_dispatch._disable_current_modes():
        operator_calls.clear()
        layer(plain)
        assert not operator_calls

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with torch.no_grad(), Mode():
        call(plain)
    assert torch.ops.nf4linear.linear.default in seen
    subclass = plain.as_subclass(type("Sub", (torch.Tensor,), {}))
    call(subclass)
    stacked = torch.func.vmap(lambda row: row * 2)(base[:2, :k])
    assert stacked.shape == (2, k)


def test_a_prompt_keeps_nothing(library):
    """A dequantized weight lives as long as its product takes."""
    layer = make_layer(k=4096, n=4096)
    x = torch.randn(2000, 4096, device="cuda", dtype=torch.bfloat16)
    y = layer(x)
    calls = dict(layer._bound._calls)
    before, result = torch.cuda.memory_allocated(), y.nbytes
    del y
    for tokens in (2000, 1999, 1998):
        layer(x[:tokens])
    assert torch.cuda.memory_allocated() == before - result and layer._bound._calls == calls


def test_a_weight_that_moves_is_bound_anew(library):
    layer = make_layer()
    x = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    before = layer(x)
    other = make_layer(seed=1)
    assert not torch.equal(other(x), before)
    layer.load_packed(other.packed(), other.bias)
    assert torch.equal(layer(x), other(x))
    layer.cpu().cuda()
    assert torch.equal(layer(x), other(x))
    layer.load_state_dict(make_layer().state_dict())  # in place
    assert torch.equal(layer(x), before)
    for name, tensor in other.packed().items():  # as accelerate does
        layer._parameters[name] = nn.Parameter(tensor.clone(), requires_grad=False)
    layer.bias = other.bias
    assert torch.equal(layer(x), other(x))


def test_copies_start_unbound(library):
    layer = make_layer()
    x = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    assert layer._bound is not None
    for other in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), want)
    assert copy.deepcopy(layer)._bound is None


def test_errors_are_those_of_the_operator(library):
    layer = make_layer()
    layer(torch.randn(1, 512, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="must end in 512"):
        layer(torch.randn(2, 256, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"input is torch\.int64"):
        layer(torch.ones(2, 512, device="cuda", dtype=torch.int64))
    with pytest.raises(ValueError, match="input is on cpu"):
        layer(torch.randn(2, 512, dtype=torch.bfloat16))


def test_both_dtypes_in_turn(library):
    layer = make_layer(bias=False)
    x = torch.randn(3, 512, device="cuda")
    for _ in range(3):
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(layer(x.to(dtype)), by_operator(layer, x.to(dtype)))


def test_captured_without_and_with_a_call_before(library):
    for warm in (False, True):
        layer = make_layer()
        x = torch.randn(2, 512, device="cuda", dtype=torch.bfloat16)
        if warm:
            layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for _ in range(3):
                y = layer(x)
        graph.replay()
        assert torch.equal(y, layer(x))


# ---- first-use check -------------------------------------------------------------------------------------------------


@pytest.fixture
def forget(monkeypatch):
    monkeypatch.setattr(selfcheck, "_verdicts", {})


def test_the_check_passes_here(library, forget):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for (spec, *_), dtype in itertools.product(selfcheck.SPECS.values(), (torch.float16, torch.bfloat16)):
            assert selfcheck.fused_allowed(library, 0, dtype, spec)
            assert not selfcheck.fused_allowed(library, 0, torch.float32, spec)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", list(itertools.chain(*selfcheck.SPECS.values())), ids=str)
def test_the_check_reaches_every_kernel_of_this_gpu(library, dtype, spec):
    """Every shape that takes one token of such a weight, most with several cuts, and large ones with few tokens too;
    and what the table picks."""
    product = selfcheck.Product(library, spec, torch.device("cuda", 0), dtype)
    shapes = [i for i in range(native.TUNE_SHAPES) if product.multiply(1, native.tuned(i, 1)) is not None]
    errors = product.errors()
    table = [tokens for tokens in selfcheck.TOKENS if product.multiply(tokens) is not None]
    assert shapes and len(table) + len(shapes) < len(errors) <= len(table) + (len(selfcheck.CUTS) + 1) * len(shapes)
    assert 0 < max(map(float, errors)) <= selfcheck.TOLERANCES[dtype]


@pytest.mark.parametrize(
    "damage", [lambda y: y.mul_(1.01), lambda y: y[:, -1:].zero_(), lambda y: y[0, 0].fill_(torch.nan)]
)
def test_a_kernel_that_is_wrong_is_left_alone(library, forget, monkeypatch, damage):
    real = library.linear

    def wrong(weight, x, bias, y, flags=0):
        done = real(weight, x, bias, y, flags)
        if done:
            damage(y)
        return done

    monkeypatch.setattr(library, "linear", wrong)
    layer = make_layer()
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"fused 4-bit kernels of .* give wrong results .* on .*bfloat16.*report"):
        got = layer(x)
    exact = x.double() @ layer.dequantize(torch.float32).double().T + layer.bias.double()
    assert ((got.double() - exact).norm() / exact.norm()) < 5e-3
    assert layer._bound is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(layer(x), got) and torch.equal(by_operator(layer, x), got)


def test_nothing_is_checked_inside_a_capture(library, forget):
    layer = make_layer()
    x = torch.randn(2, 512, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert not selfcheck._verdicts
    exact = x.double() @ layer.dequantize(torch.float32).double().T + layer.bias.double()
    assert ((y.double() - exact).norm() / exact.norm()) < 5e-3
    assert eager.plain_call(x, layer.bias) and layer(x).isfinite().all() and selfcheck._verdicts

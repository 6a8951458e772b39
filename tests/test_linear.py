"""NF4Linear and W8Linear as modules: values, shapes, dtypes, casts, copies, state dicts, bitsandbytes in and out."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nf4linear import NF4Linear, PackedLinear, W8Linear, reference
from nf4linear.formats import EightBitSpec, FourBitSpec, WeightSpec
from operands import SPECS, fresh_weight, packed_weight, spec_id

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative to the largest output: one rounding of the result, plus the order of summation.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def make_layer(spec: WeightSpec, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> PackedLinear:
    layer = PackedLinear.from_spec(spec, bias=False, dtype=dtype)
    layer.layer_name = "model.layers.0.proj"
    vector = torch.randn(spec.n, generator=torch.Generator().manual_seed(1)).to(dtype)
    return layer.load_packed(packed_weight(spec), vector if bias else None)


def make_nf4(dtype: torch.dtype = torch.bfloat16) -> NF4Linear:
    return make_layer(FourBitSpec("nf4", 48, 128), dtype=dtype)


def make_w8(dtype: torch.dtype = torch.bfloat16) -> W8Linear:
    return make_layer(EightBitSpec("w8_s8", 48, 128), dtype=dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.float() - want.float()).abs().max()
    assert error <= TOLERANCE[want.dtype] * want.float().abs().max(), error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def same_packed(a: PackedLinear, b: PackedLinear) -> bool:
    left, right = a.packed(), b.packed()
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and torch.equal(as_bytes(left[k]), as_bytes(right[k])) for k in left
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_forward_is_the_reference(spec, dtype):
    layer = make_layer(spec, dtype=dtype)
    x = torch.randn(5, spec.k, generator=torch.Generator().manual_seed(2)).to(dtype)
    close(layer(x), reference.linear(spec, fresh_weight(spec), x, layer.bias))


@pytest.mark.parametrize("make", [make_nf4, make_w8])
@pytest.mark.parametrize("shape", [(128,), (1, 128), (0, 128), (2, 0, 128), (3, 5, 128), (1, 2, 3, 128)])
def test_output_shape_is_that_of_nn_linear(make, shape):
    plain = nn.Linear(128, 48)
    x = torch.randn(shape)
    assert make()(x).shape == plain(x).shape


@pytest.mark.parametrize("make", [make_nf4, make_w8])
def test_output_dtype_is_that_of_the_input(make):
    for layer_dtype in DTYPES:
        layer = make(layer_dtype)
        for dtype in DTYPES:
            assert layer(torch.randn(3, 128, dtype=dtype)).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert make(torch.float32)(torch.randn(3, 128)).dtype == torch.bfloat16


@pytest.mark.parametrize("make", [make_nf4, make_w8])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t(64, 256)[:, ::2],
        lambda t: t(128, 7).t(),
        lambda t: t(6, 129)[..., 1:],
        lambda t: t(1, 128).expand(5, -1),
        lambda t: t(3, 128, 2).transpose(1, 2),
    ],
)
def test_any_memory_layout_of_the_input(make, view):
    layer = make(torch.float32)
    x = view(torch.randn)
    close(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(3, 127), ValueError, ["127", "128"]),
        (torch.zeros(()), ValueError, ["128"]),
        (torch.zeros(3, 128, dtype=torch.float64), TypeError, ["float64"]),
        (torch.zeros(3, 128, dtype=torch.int64), TypeError, ["int64"]),
    ],
)
def test_bad_input_is_refused_by_name(x, error, words):
    with pytest.raises(error) as caught:
        make_nf4()(x)
    assert all(word in str(caught.value) for word in ["model.layers.0.proj", *words])


@pytest.mark.parametrize("make", [make_nf4, make_w8])
def test_gradient_of_input_and_bias(make):
    layer = make(torch.float32)
    x = torch.randn(4, 128, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 48) @ layer.dequantize(torch.float32))
    torch.testing.assert_close(layer.bias.grad, torch.full((48,), 4.0))
    assert not any(p.requires_grad for p in layer.packed().values())
    with torch.no_grad():
        assert not layer(x).requires_grad


def cast_all(layer: nn.Module):
    yield copy.deepcopy(layer).half()
    yield copy.deepcopy(layer).float()
    yield copy.deepcopy(layer).bfloat16()
    yield copy.deepcopy(layer).double()
    yield copy.deepcopy(layer).to(torch.float16)
    yield copy.deepcopy(layer).to("cpu", torch.float16)
    yield copy.deepcopy(layer).type(torch.float16)
    yield nn.Sequential(copy.deepcopy(layer)).half()[0]


@pytest.mark.parametrize("make", [make_nf4, make_w8])
def test_casts_change_the_bias_and_nothing_else(make):
    layer = make()
    x = torch.randn(3, 128)
    for cast in cast_all(layer):
        assert same_packed(cast, layer)
        assert cast.compute_dtype == cast.weight.dtype and cast.compute_dtype in DTYPES
        assert cast.bias.dtype in (cast.compute_dtype, torch.float64)
        close(cast(x), F.linear(x, layer.dequantize(torch.float32), cast.bias.float()))
    assert make().half().compute_dtype == torch.float16


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [make_nf4, make_w8])
def test_statistics_are_float32_under_any_default_dtype(make, default):
    source = make()
    plain = source.to_linear(torch.float32)
    quantized = PackedLinear.from_linear(plain, format=source.default_format)
    torch.set_default_dtype(default)
    try:
        fresh = NF4Linear(128, 48), W8Linear(128, 48)
        layer = PackedLinear.from_spec(source.spec).load_packed(source.packed())
        requantized = PackedLinear.from_linear(plain, format=source.default_format)
        x = torch.ones(2, 128, dtype=torch.float32)
        got = layer(x)
    finally:
        torch.set_default_dtype(torch.float32)
    for module in (*fresh, layer, requantized):
        assert {p.dtype for p in module.packed().values()} == {torch.float32, torch.uint8}
    assert fresh[0].bias.dtype == fresh[0].compute_dtype == default
    assert same_packed(layer, source) and same_packed(requantized, quantized)
    torch.testing.assert_close(got, F.linear(x, source.dequantize(torch.float32)))


@pytest.mark.parametrize("make", [make_nf4, make_w8])
def test_copies_are_equal_and_independent(make):
    layer = make()
    x = torch.randn(2, 128)
    want = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    for other in copies:
        assert type(other) is type(layer) and other.spec == layer.spec and other.layer_name == layer.layer_name
        assert torch.equal(other(x), want)
        other.qweight.data.zero_()
        assert torch.equal(layer(x), want)


@pytest.mark.parametrize("make", [make_nf4, make_w8])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(make, assign):
    layer = make()
    x = torch.randn(2, 128)
    state = layer.state_dict()
    assert set(state) == {*layer.spec.packed_tensors(), "bias"}
    fresh = type(layer)(128, 48, dtype=torch.bfloat16)
    with torch.device("meta"):
        on_meta = type(layer)(128, 48, dtype=torch.bfloat16)
    assert on_meta(x.to("meta")).shape == (2, 48)
    targets = [fresh, make(), on_meta if assign else on_meta.to_empty(device="cpu")]
    for target in targets:
        target.load_state_dict(copy.deepcopy(state), strict=True, assign=assign)
        assert same_packed(target, layer) and torch.equal(target(x), layer(x))
        assert not any(p.requires_grad for p in target.packed().values())


def test_meta_moves_keep_shapes():
    layer = make_nf4()
    state = copy.deepcopy(layer.state_dict())
    moved = copy.deepcopy(layer).to("meta")
    assert {k: (v.shape, v.dtype) for k, v in moved.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in state.items()
    }
    back = moved.to_empty(device="cpu")
    back.load_state_dict(state)
    assert same_packed(back, layer)


def damaged_states(state: dict[str, torch.Tensor]):
    yield "absmax_q", {**state, "absmax_q": state["absmax_q"].float()}
    yield "qweight", {**state, "qweight": state["qweight"][:1]}
    yield "nested_absmax", {k: v for k, v in state.items() if k != "nested_absmax"}
    yield "qweight", {k: v for k, v in state.items() if k != "qweight"}
    yield "nested_offset", {**state, "nested_offset": torch.tensor(float("nan"))}
    yield "code", {**state, "code": state["code"].flip(0)}
    yield "weight", {**state, "weight": torch.zeros(48, 128)}


@pytest.mark.parametrize("strict", [True, False])
def test_damaged_state_dicts_are_refused_by_name_and_change_nothing(strict):
    layer = make_nf4()
    for key, state in damaged_states(layer.state_dict()):
        model = nn.ModuleDict({"proj": copy.deepcopy(layer)})
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict({f"proj.{k}": v for k, v in state.items()}, strict=strict)
        assert "proj" in str(caught.value) and key in str(caught.value)
        assert same_packed(model["proj"], layer)


def test_load_packed_refuses_by_name():
    layer, other = make_nf4(), packed_weight(FourBitSpec("nf4", 48, 192))
    before = copy.deepcopy(layer)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.proj.*qweight"):
        layer.load_packed(other)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.proj.*bias"):
        layer.load_packed(layer.packed(), torch.zeros(47))
    assert same_packed(layer, before)


def test_each_layer_owns_its_tables():
    tensors = packed_weight(FourBitSpec("nf4", 48, 128))
    first, second = (PackedLinear.from_spec(FourBitSpec("nf4", 48, 128), False).load_packed(tensors) for _ in "ab")
    for name in ("code", "nested_code", "nested_offset"):
        assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr()


# ---- weight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_nf4, make_w8])
def test_weight_reads_as_the_dequantized_tensor(make):
    layer = make()
    weight, want = layer.weight, layer.dequantize()
    assert (weight.dtype, weight.shape, weight.device) == (want.dtype, want.shape, want.device)
    assert isinstance(weight, torch.Tensor) and not weight.requires_grad and weight.numel() == want.numel()
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    for got in (
        weight + 0,
        weight.clone(),
        weight.to("cpu") * 1,
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
    ):
        assert type(got) is torch.Tensor and torch.equal(got, want)
    assert torch.equal(F.linear(x, weight, layer.bias), F.linear(x, want, layer.bias))
    assert weight.float().tolist() == want.float().tolist() and repr(weight) == repr(want)
    assert (weight.to(torch.float32).numpy() == want.float().numpy()).all() and (weight[3] == want[3]).all()
    assert torch.zeros(48, 128).copy_(weight).equal(want.float())
    assert "weight" not in layer.state_dict() and "weight" not in dict(layer.named_parameters())


def test_asking_for_the_dtype_costs_no_dequantization(monkeypatch):
    layer = make_nf4()
    monkeypatch.setattr(PackedLinear, "dequantize", lambda *_: pytest.fail("dequantized"))
    weight = layer.weight
    assert weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape == (48, 128)
    assert weight.data.dtype == torch.bfloat16 and weight.is_floating_point() and not weight.is_cuda


WRITES = {
    "data_iadd": lambda q: exec("q.weight.data += 1", {"q": q}),
    "data_assign": lambda q: setattr(q.weight, "data", torch.zeros(48, 128)),
    "add_": lambda q: q.weight.add_(1),
    "data_add_": lambda q: q.weight.data.add_(1),
    "setitem": lambda q: q.weight.__setitem__(0, 0),
    "copy_": lambda q: q.weight.copy_(torch.zeros(48, 128)),
    "out": lambda q: torch.add(torch.ones(48, 128), 1, out=q.weight),
    "init": lambda q: nn.init.normal_(q.weight),
    "assign_parameter": lambda q: setattr(q, "weight", nn.Parameter(torch.zeros(48, 128))),
    "assign_tensor": lambda q: setattr(q, "weight", torch.zeros(48, 128)),
    "register": lambda q: q.register_parameter("weight", nn.Parameter(torch.zeros(48, 128))),
    "reset_parameters": lambda q: q.reset_parameters(),
    "data_ptr": lambda q: q.weight.data_ptr(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_through_weight_are_refused_by_name(write):
    layer = make_nf4()
    before = copy.deepcopy(layer)
    with pytest.raises((RuntimeError, AttributeError), match=r"model\.layers\.0\.proj"):
        write(layer)
    assert same_packed(layer, before)


def test_compiles_whole():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.w = make_nf4(torch.float32), make_layer(EightBitSpec("w8_s8", 64, 48), dtype=torch.float32)

        def forward(self, x):
            return self.w(self.q(x.to(self.q.weight.dtype)))

    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="eager", dynamic=True)
    for m in (2, 5, 9):
        x = torch.randn(m, 128)
        torch.testing.assert_close(compiled(x), block(x))


# ---- from other layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"format": "fp4"}, {"blocksize": 128}, {"blocksize": 32}, {"double_quant": False}, {"format": "w8_s8"}],
)
def test_from_linear_holds_the_quantized_weight(options):
    linear = nn.Linear(128, 48).bfloat16()
    layer = PackedLinear.from_linear(linear, name="x", **{"format": "nf4", **options})
    want = reference.dequantize(layer.spec, reference.quantize(layer.spec, linear.weight.detach()), torch.float32)
    assert torch.equal(layer.dequantize(torch.float32), want)
    assert layer.bias is linear.bias and layer.compute_dtype == torch.bfloat16
    plain = layer.to_linear()
    assert type(plain) is nn.Linear and torch.equal(plain.weight, layer.dequantize())


def test_from_linear_refuses_by_name():
    linear = nn.Linear(64, 16)
    with torch.no_grad():
        linear.weight[3, 4] = float("inf")
    with pytest.raises(ValueError, match="up_proj"):
        NF4Linear.from_linear(linear, name="up_proj")
    with pytest.raises(ValueError, match="up_proj"):
        NF4Linear.from_linear(nn.Linear(64, 16, device="meta"), name="up_proj")
    with pytest.raises(ValueError, match="blocksize"):
        NF4Linear.from_linear(nn.Linear(64, 16), blocksize=48)


@pytest.mark.parametrize("shape", [(7, 33), (48, 100), (3, 48), (1, 1), (64, 96), (32, 192)])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bnb_4bit_takes_over_codes_and_gives_them_back(shape, double_quant, quant_type):
    n, k = shape
    source = bnb.nn.Linear4bit(k, n, quant_type=quant_type, compress_statistics=double_quant).bfloat16().to("cpu")
    layer = NF4Linear.from_bnb(source, name="proj")
    assert layer.spec == FourBitSpec(quant_type, n, k, 64, double_quant)
    # bitsandbytes' own dequantize on a CPU is wrong where K is no multiple of the blocksize, hence by hand.
    state = source.weight.quant_state
    absmax = state.absmax
    if double_quant:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    codes = source.weight.data.view(-1)
    codes = torch.stack([codes >> 4, codes & 15], 1).view(-1)[: n * k].long()
    want = (state.code[codes] * absmax.repeat_interleave(64)[: n * k]).view(n, k)
    assert torch.equal(layer.dequantize(torch.float32), want)
    before, after = source.state_dict(), layer.to_bnb().state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("storage", [torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096])
def test_bnb_storage_dtypes_and_blocksizes(storage, blocksize):
    torch.manual_seed(0)
    source = bnb.nn.Linear4bit(256, 64, quant_type="nf4", quant_storage=storage)
    source.weight.blocksize = blocksize
    fresh = NF4Linear.from_bnb(source)  # not quantized yet: by ours
    plain = nn.Linear(256, 64)
    plain.weight.data.copy_(source.weight.data)
    source = source.to("cpu")  # quantized by bitsandbytes
    layer = NF4Linear.from_bnb(source)
    assert layer.spec.blocksize == fresh.spec.blocksize == blocksize
    assert torch.equal(fresh.qweight, layer.qweight)
    assert same_packed(fresh, NF4Linear.from_linear(plain, blocksize=blocksize))
    before, after = source.state_dict(), layer.to_bnb().state_dict()
    assert all(torch.equal(as_bytes(before[key]), as_bytes(after[key])) for key in before)
    assert after["weight"].dtype == storage and after["weight"].shape == before["weight"].shape


@pytest.mark.parametrize("double_quant", [True, False])
def test_bnb_layer_that_ran_on_a_cpu_is_restored_with_a_remark(double_quant):
    source = bnb.nn.Linear4bit(128, 64, quant_type="nf4", compress_statistics=double_quant).bfloat16().to("cpu").eval()
    before = NF4Linear.from_bnb(source)
    with torch.no_grad():
        want = source(torch.ones(2, 128, dtype=torch.bfloat16))
    if not getattr(source.weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("this CPU has no bfloat16 instructions: bitsandbytes does not repack")
    with pytest.warns(UserWarning, match="already run on a CPU"):
        after = NF4Linear.from_bnb(source)
    assert torch.equal(after.qweight, before.qweight)
    torch.testing.assert_close(after.dequantize(), before.dequantize(), rtol=2e-2, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NF4Linear.from_bnb(source)  # the remark is made once
    with torch.no_grad():
        assert torch.equal(source(torch.ones(2, 128, dtype=torch.bfloat16)), want)  # the source is not changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bnb_nested_dtype_of_16_bits_is_kept_with_a_remark(dtype):
    source = bnb.nn.Linear4bit(128, 64, quant_type="nf4").bfloat16().to("cpu")
    source.weight.quant_state.state2.dtype = dtype
    with pytest.warns(UserWarning, match="nested_dtype"):
        layer = NF4Linear.from_bnb(source)
    assert layer.to_bnb().weight.quant_state.state2.dtype == dtype


def damage(name: str, state) -> None:
    if name == "absmax shape":
        state.absmax = state.absmax[:-1]
    elif name == "nested statistics lost":
        state.state2, state.nested = None, False
    elif name == "code":
        state.code = state.code.flip(0)
    elif name == "nested code":
        state.state2.code = state.state2.code[:255]
    elif name == "shape":
        state.shape = torch.Size((128, 65))
    elif name == "offset":
        state.offset = torch.tensor(float("inf"))
    elif name == "nested blocksize":
        state.state2.blocksize = 128


@pytest.mark.parametrize(
    "what", ["absmax shape", "nested statistics lost", "code", "nested code", "shape", "offset", "nested blocksize"]
)
def test_bnb_layers_with_impossible_statistics_are_refused_by_name(what):
    source = bnb.nn.Linear4bit(128, 64, quant_type="nf4").bfloat16().to("cpu")
    damage(what, source.weight.quant_state)
    with pytest.raises(ValueError, match=r"layers\.3\.up_proj"):
        NF4Linear.from_bnb(source, name="layers.3.up_proj")


def test_bnb_8bit_before_and_after_its_first_forward():
    source = bnb.nn.Linear8bitLt(100, 48, has_fp16_weights=False, threshold=6.0).bfloat16().to("cpu")
    layer = W8Linear.from_bnb(source, name="proj")
    row_maxima = source.weight.SCB
    assert torch.equal(layer.scale, row_maxima)
    want = bnb.functional.int8_vectorwise_dequant(source.weight.data, row_maxima)
    assert torch.equal(layer.dequantize(torch.float32), want)
    before, after = source.state_dict(), layer.to_bnb().state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert layer.to_bnb().state.threshold == 6.0
    with torch.no_grad():
        source(torch.randn(2, 100, dtype=torch.bfloat16))
    assert source.weight.SCB is None  # moved into the state
    assert same_packed(W8Linear.from_bnb(source), layer)


def test_bnb_8bit_that_holds_no_8bit_weight_is_refused():
    with pytest.raises(ValueError, match=r"proj.*has_fp16_weights"):
        W8Linear.from_bnb(bnb.nn.Linear8bitLt(64, 48), name="proj")
    source = bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=False).to("cpu")
    source.weight.SCB = None
    with pytest.raises(ValueError, match=r"proj.*SCB"):
        W8Linear.from_bnb(source, name="proj")
    with pytest.raises(TypeError, match=r"proj.*Linear"):
        NF4Linear.from_bnb(nn.Linear(64, 48), name="proj")
    with pytest.raises(ValueError, match="bitsandbytes has no"):
        W8Linear.from_linear(nn.Linear(128, 48), group_size=64).to_bnb()


def test_tensors_that_are_replaced_between_calls_are_used():
    """An eager call keeps pointers: to `.data` that was exchanged, and to one table that was assigned alone."""
    layer, other = (NF4Linear.from_linear(nn.Linear(128, 64, bias=False)) for _ in range(2))
    x = torch.randn(1, 128)
    with torch.no_grad():
        layer(x)
        for name, tensor in other.packed().items():
            layer.get_parameter(name).data = tensor.data.clone()
        torch.testing.assert_close(layer(x), other(x))
        doubled = nn.Parameter(other.nested_absmax * 2, requires_grad=False)
        layer.nested_absmax = doubled
        torch.testing.assert_close(layer(x), x @ layer.dequantize(torch.float32).T)
        assert not torch.allclose(layer(x), other(x))

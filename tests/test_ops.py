"""The operators: results, shapes, refusals, gradients, opcheck and torch.compile, with and without the CPU library."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nf4linear import native, ops, reference
from nf4linear.formats import EightBitSpec, FourBitSpec
from operands import SPECS, fresh_weight, geometry, operands, packed_weight, same_bits, spec_id

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TILED = FourBitSpec("nf4", 48, 128)
# Relative to the largest output: inputs and weights are rounded to the dtype, sums are taken in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(params=["native", "torch"])
def path(request, monkeypatch):
    """Each test on the CPU library and on the torch path."""
    if request.param == "native":
        if not native.library("cpu"):
            pytest.skip("the CPU library is not built here")
    else:
        monkeypatch.setattr(native, "library", lambda kind: native.MissingLibrary(kind, "switched off by the test"))
    return request.param


def call(spec, packed, x, bias=None):
    return ops.linear(x, *operands(spec, packed), bias, *geometry(spec))


def assert_near(got, exact):
    assert got.shape == exact.shape
    error = (got.double() - exact).abs().max().item()
    assert error <= TOLERANCE[got.dtype] * exact.abs().max().item(), error


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_is_the_reference_bit_for_bit(path, spec, dtype):
    got = ops.dequantize(*operands(spec, packed_weight(spec)), *geometry(spec), dtype)
    assert same_bits(got, reference.dequantize(spec, fresh_weight(spec), dtype))


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 5, 33])
def test_linear_against_float64(path, spec, dtype, m):
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, spec.k, generator=generator).to(dtype)
    bias = torch.randn(spec.n, generator=generator).to(dtype)
    weight = reference.dequantize(spec, fresh_weight(spec), torch.float32).double()
    got = call(spec, packed_weight(spec), x, bias)
    assert got.dtype == dtype
    assert_near(got, x.double() @ weight.T + bias.double())
    assert torch.equal(got, call(spec, packed_weight(spec), x, bias)), "two calls differ"


@pytest.mark.parametrize("shape", [(128,), (1, 128), (2, 3, 128), (1, 2, 3, 128), (0, 128), (2, 0, 128)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_any_leading_shape(path, shape, bias):
    x = torch.randn(shape)
    b = torch.randn(48) if bias else None
    weight = reference.dequantize(TILED, fresh_weight(TILED), torch.float32)
    got = call(TILED, packed_weight(TILED), x, b)
    want = torch.nn.functional.linear(x, weight, b)
    assert got.shape == want.shape and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def views_of(base):
    """Inputs [3, 128] that are not plain contiguous tensors."""
    yield "transposed", base[:128, :3].t()
    yield "every other column", base[:3, :256:2]
    yield "shifted by one element", base[:3, 1:129]
    yield "expanded row", base[:1, :128].expand(3, -1)
    yield "reversed halves", torch.stack((base[2, :128], base[1, :128], base[0, :128]))
    yield "middle of three dimensions", base[:, :384].view(-1, 3, 128)[4:5].transpose(0, 1).squeeze(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_equal_their_copies(path, dtype):
    packed = packed_weight(TILED)
    base = torch.randn(260, 400).to(dtype)
    for name, x in views_of(base):
        copy = x.clone(memory_format=torch.contiguous_format)
        # Not bit for bit: a BLAS may take a strided input in another order.
        got, want = call(TILED, packed, x), call(TILED, packed, copy)
        assert (got.float() - want.float()).abs().max() <= TOLERANCE[dtype] * want.float().abs().max(), name


def test_strided_bias(path):
    bias = torch.randn(96)[::2]
    x = torch.randn(2, 128)
    packed = packed_weight(TILED)
    assert torch.equal(call(TILED, packed, x, bias), call(TILED, packed, x, bias.contiguous()))


def test_weights_that_start_anywhere(path):
    """A loader may map codes and scales at any byte of a file."""
    for spec in SPECS:
        packed = packed_weight(spec)
        shifted = dict(packed)
        for name in ("qweight", spec.scales_name):
            step = packed[name].element_size()
            raw = torch.zeros(packed[name].numel() * step + 16, dtype=torch.uint8)
            view = raw[step : step + packed[name].numel() * step].view(packed[name].dtype).view(packed[name].shape)
            shifted[name] = view.copy_(packed[name])
        x = torch.randn(3, spec.k)
        assert torch.equal(call(spec, shifted, x), call(spec, packed, x))


def test_nothing_outside_the_output_is_written(path):
    """Inputs keep their bytes, whatever the padding of the tiles."""
    for spec in SPECS:
        packed = packed_weight(spec)
        before = {name: tensor.clone() for name, tensor in packed.items()}
        x = torch.randn(3, spec.k)
        kept = x.clone()
        call(spec, packed, x)
        assert torch.equal(x, kept)
        for name in packed:
            assert torch.equal(packed[name], before[name]), (spec, name)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nested_offset", "nested_absmax", "nested_code"])
def test_sixteen_bit_statistics_are_refused(path, name):
    packed = packed_weight(TILED)
    packed[name] = packed[name].bfloat16()
    with pytest.raises(ValueError, match=f"{name} is torch.bfloat16.*float32"):
        call(TILED, packed, torch.randn(2, 128))
    with pytest.raises(ValueError, match=f"{name} is torch.bfloat16"):
        ops.dequantize(*operands(TILED, packed), *geometry(TILED), torch.float32)


@pytest.mark.parametrize("damage", ["rows", "scales", "missing", "surplus", "strided", "eight-bit scale"])
def test_weights_a_kernel_would_misread_are_refused(path, damage):
    spec, packed = TILED, packed_weight(TILED)
    if damage == "rows":
        packed["qweight"], words = packed["qweight"][:2], r"qweight.*\[2, 2, 512\]"
    elif damage == "scales":
        packed["absmax_q"], words = packed["absmax_q"].float(), "absmax_q is torch.float32"
    elif damage == "missing":
        packed["nested_absmax"], words = None, "nested_absmax is missing"
    elif damage == "surplus":
        spec = FourBitSpec("nf4", 48, 128, double_quant=False)
        packed, words = packed_weight(spec) | {"nested_offset": torch.zeros(())}, "without nested_code"
    elif damage == "strided":
        packed["nested_code"], words = torch.zeros(512)[::2], "nested_code is not contiguous"
    else:
        spec = EightBitSpec("w8_s8", 48, 128)
        packed = packed_weight(spec)
        packed["scale"], words = packed["scale"].half(), "scale is torch.float16"
    with pytest.raises(ValueError, match=words):
        call(spec, packed, torch.randn(2, 128))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_are_type_errors(path, dtype):
    with pytest.raises(TypeError, match=str(dtype)):
        call(TILED, packed_weight(TILED), torch.zeros(2, 128, dtype=dtype))
    with pytest.raises(TypeError, match=str(dtype)):
        ops.dequantize(*operands(TILED, packed_weight(TILED)), *geometry(TILED), dtype)


def test_wrong_inputs_name_both_numbers(path):
    packed = packed_weight(TILED)
    with pytest.raises(ValueError, match=r"127.*128"):
        call(TILED, packed, torch.zeros(3, 127))
    with pytest.raises(ValueError, match="in_features=128"):
        call(TILED, packed, torch.zeros(()))
    with pytest.raises(TypeError, match=r"bias is torch.float16.*torch.float32"):
        call(TILED, packed, torch.zeros(3, 128), torch.zeros(48).half())
    with pytest.raises(ValueError, match=r"\[47\].*48"):
        call(TILED, packed, torch.zeros(3, 128), torch.zeros(47))


# ---- autograd, opcheck, compile --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128,), (3, 128), (2, 3, 128)], ids=str)
def test_gradients_flow_to_input_and_bias(path, shape):
    x = torch.randn(shape, requires_grad=True)
    bias = torch.randn(48, requires_grad=True)
    packed = packed_weight(TILED)
    y = call(TILED, packed, x, bias)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    weight = reference.dequantize(TILED, fresh_weight(TILED), torch.float32)
    torch.testing.assert_close(x.grad, upstream @ weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias.grad, upstream.reshape(-1, 48).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "spec", [TILED, FourBitSpec("fp4", 7, 33, double_quant=False), EightBitSpec("w8_s8", 20, 50)], ids=spec_id
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(path, spec, requires_grad):
    packed = packed_weight(spec)
    x = torch.randn(2, 3, spec.k, requires_grad=requires_grad)
    bias = torch.randn(spec.n, requires_grad=requires_grad)
    torch.library.opcheck(ops.linear.default, (x, *operands(spec, packed), bias, *geometry(spec)))
    torch.library.opcheck(ops.linear.default, (x[:, ::2], *operands(spec, packed), None, *geometry(spec)))
    torch.library.opcheck(ops.dequantize.default, (*operands(spec, packed), *geometry(spec), torch.float16))


def test_compile_fullgraph_with_dynamic_batch(path):
    packed = packed_weight(TILED)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def model(x):
        return torch.relu(call(TILED, packed, x * 2))

    for m in (5, 64, 17, 7, 1):
        x = torch.randn(m, 128)
        torch.testing.assert_close(model(x), torch.relu(call(TILED, packed, x * 2)))
    assert counter.frame_count <= 2


def test_fakes_refuse_what_the_kernels_refuse():
    packed = {name: tensor.to("meta") for name, tensor in packed_weight(TILED).items()}
    assert call(TILED, packed, torch.zeros(2, 3, 128, device="meta", dtype=torch.bfloat16)).shape == (2, 3, 48)
    with pytest.raises(ValueError, match="in_features=128"):
        call(TILED, packed, torch.zeros(2, 100, device="meta"))
    with pytest.raises(TypeError, match="float64"):
        call(TILED, packed, torch.zeros(2, 128, device="meta", dtype=torch.float64))


def test_the_output_dtype_is_the_inputs_even_under_autocast(path):
    x = torch.randn(2, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = call(TILED, packed_weight(TILED), x)
    assert got.dtype == torch.float32
    assert torch.equal(got, call(TILED, packed_weight(TILED), x))

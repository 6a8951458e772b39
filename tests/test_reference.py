"""The torch reference against bitsandbytes, bit for bit, and against float64."""

import pytest
import torch

from nf4linear import reference, reorder
from nf4linear.formats import BLOCKSIZES, EightBitSpec, FourBitSpec
from operands import SPECS, fresh_weight, spec_id

bnb = pytest.importorskip("bitsandbytes")
FOUR_BIT = [spec for spec in SPECS if isinstance(spec, FourBitSpec)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def quant_state(spec, canonical, dtype):
    """bitsandbytes' own description of the same tensors."""
    nested = {}
    if spec.double_quant:
        state2 = bnb.functional.QuantState(
            absmax=canonical["nested_absmax"], code=canonical["nested_code"], blocksize=256, dtype=torch.float32
        )
        nested = {"offset": canonical["nested_offset"], "state2": state2}
    return bnb.functional.QuantState(
        absmax=canonical["absmax"],
        shape=torch.Size((spec.n, spec.k)),
        dtype=dtype,
        blocksize=spec.blocksize,
        code=canonical["code"],
        quant_type=spec.format,
        **nested,
    )


def default_backend(name, *args):
    """bitsandbytes' device-independent arithmetic, run eagerly.

    Its compiled CPU quantizer is an approximation near ties, and its compiled CPU dequantizer (0.50.2) is wrong for
    some shapes whose rows are no multiple of the blocksize, 3 x 48 for one.
    """
    op = getattr(torch.ops.bitsandbytes, name).default
    with torch.compiler.set_stance("force_eager"):
        return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)


@pytest.mark.parametrize("spec", FOUR_BIT, ids=spec_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_equals_bitsandbytes(spec, dtype):
    canonical = fresh_weight(spec, seed=1)
    ours = reference.dequantize(spec, canonical, dtype)
    assert ours.dtype == dtype
    absmax = canonical["absmax"]
    if spec.double_quant:
        tables = canonical["nested_absmax"], canonical["nested_code"]
        absmax = default_backend("dequantize_blockwise", absmax, *tables, 256, torch.float32)
        absmax = absmax + canonical["nested_offset"]
    codes, shape = canonical["codes"].view(-1, 1), [spec.n, spec.k]
    theirs = default_backend("dequantize_4bit", codes, absmax, spec.blocksize, spec.format, shape, dtype)
    assert torch.equal(ours, theirs)
    if spec.k % spec.blocksize == 0:
        assert torch.equal(ours, bnb.functional.dequantize_4bit(codes, quant_state(spec, canonical, dtype)))


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_quantize_equals_bitsandbytes(format, blocksize):
    spec = FourBitSpec(format, 96, 4096, blocksize)
    weight = torch.randn(spec.n, spec.k, generator=torch.Generator().manual_seed(blocksize))
    codes, absmax = default_backend("quantize_4bit", weight, blocksize, format, torch.uint8)
    ours = reference.quantize(FourBitSpec(format, 96, 4096, blocksize, double_quant=False), weight)
    assert torch.equal(ours["codes"], codes.view(-1))
    assert torch.equal(ours["absmax"], absmax)
    nested = reference.quantize(spec, weight)
    offset = absmax.mean()
    assert torch.equal(nested["nested_offset"], offset)
    table = bnb.functional.create_dynamic_map()
    theirs, scales = default_backend("quantize_blockwise", absmax - offset, table, 256)
    full = spec.blocks // 256 * 256
    assert torch.equal(nested["absmax"][:full], theirs[:full])
    # In a last, incomplete block it divides where it multiplies by the reciprocal elsewhere: ties may fall either way.
    assert ((nested["absmax"][full:].int() - theirs[full:].int()).abs() <= 1).all()
    assert torch.equal(nested["nested_absmax"], scales)


@pytest.mark.parametrize(("n", "k"), [(7, 33), (48, 100), (3, 48), (1, 1), (20, 100), (5, 1000)])
def test_quantize_of_odd_shapes_reads_back_as_bitsandbytes_does(n, k):
    """A last incomplete block, and an odd number of weights."""
    spec = FourBitSpec("nf4", n, k, double_quant=False)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    ours = reference.quantize(spec, weight)
    assert {name: tuple(t.shape) for name, t in ours.items()} == {
        name: t.shape for name, t in spec.canonical_tensors().items()
    }
    codes, absmax = default_backend("quantize_4bit", weight, 64, "nf4", torch.uint8)
    assert torch.equal(ours["absmax"], absmax)
    full = n * k // 64 * 32
    assert torch.equal(ours["codes"][:full], codes.view(-1)[:full])
    theirs = default_backend("dequantize_4bit", codes, absmax, 64, "nf4", [n, k], torch.float32)
    torch.testing.assert_close(reference.dequantize(spec, ours, torch.float32), theirs, rtol=0, atol=1e-6)


def test_sixteen_bit_nested_dtype_is_emulated():
    """Files saved after a CPU forward: bitsandbytes then rounds product and sum to 16 bit on the way."""
    spec = FourBitSpec("nf4", 32, 256)
    canonical = fresh_weight(spec, seed=2)
    for dtype in (torch.bfloat16, torch.float16):
        state2 = bnb.functional.QuantState(
            absmax=canonical["nested_absmax"], code=canonical["nested_code"], blocksize=256, dtype=dtype
        )
        theirs = bnb.functional.dequantize_blockwise(canonical["absmax"], state2)
        theirs += canonical["nested_offset"]
        ours = reference.block_scales(spec, canonical, nested_dtype=dtype)
        assert torch.equal(ours, theirs.float())
        assert not torch.equal(ours, reference.block_scales(spec, canonical))


def test_eight_bit_equals_bitsandbytes():
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(3))
    spec = EightBitSpec("w8_s8", 40, 96)
    ours = reference.quantize(spec, weight)
    theirs = bnb.functional.int8_vectorwise_dequant(ours["codes"], ours["scale"])
    assert torch.equal(reference.dequantize(spec, ours, torch.float32), theirs)
    codes, scale, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    mine = reference.quantize(spec, weight.half())
    assert torch.equal(mine["scale"], scale.float())
    assert (mine["codes"].int() - codes.int()).abs().max() <= 1  # it rounds in float16


def test_eight_bit_beyond_float16_stays_finite():
    weight = torch.full((2, 32), 1.0)
    weight[0, 0] = 1e5
    got = reference.quantize(EightBitSpec("w8_s8", 2, 32), weight.bfloat16())
    assert got["scale"].isfinite().all() and got["codes"][0, 0] == 127


@pytest.mark.parametrize("spec", [s for s in SPECS if s.format != "w8_u8"], ids=spec_id)
def test_zero_and_tiny_blocks(spec):
    weight = torch.zeros(spec.n, spec.k)
    weight.view(-1)[-1] = 1e-40
    got = reference.dequantize(spec, reference.quantize(spec, weight), torch.float32)
    assert got.isfinite().all() and got.abs().max() <= 1e-30


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_weights_are_refused(bad):
    weight = torch.ones(16, 64)
    weight[3, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        reference.quantize(FourBitSpec("nf4", 16, 64), weight)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_linear_against_float64(spec):
    canonical = fresh_weight(spec)
    x = torch.randn(5, spec.k, generator=torch.Generator().manual_seed(4))
    bias = torch.randn(spec.n, generator=torch.Generator().manual_seed(5))
    exact = x.double() @ reference.dequantize(spec, canonical, torch.float32).double().T + bias.double()
    got = reference.linear(spec, canonical, x, bias)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())


@pytest.mark.parametrize("damage", ["scale", "code", "permute"])
def test_a_damaged_weight_is_noticed(damage):
    """The comparisons above can fail: one scale, one code or a wrong permute changes the result."""
    spec = FourBitSpec("nf4", 32, 128)
    canonical = fresh_weight(spec)
    right = reference.dequantize(spec, canonical, torch.bfloat16)
    if damage == "scale":
        canonical["absmax"][3] += 1
    elif damage == "code":
        canonical["codes"][100] ^= 0x10
    else:
        packed = reorder.pack(spec, canonical)
        packed["qweight"] = packed["qweight"].view(2, 2, 8, 4, 16).transpose(2, 3).reshape(2, 2, 512)
        canonical = reorder.unpack(spec, packed)
    assert not torch.equal(reference.dequantize(spec, canonical, torch.bfloat16), right)

"""The dequantize kernel on a GPU: bit-identical to bitsandbytes and the reference, and nothing else is written."""

import importlib.util

import pytest
import torch
from fused import any_weight

from nf4linear import native, ops, reference, reorder
from nf4linear.formats import BLOCKSIZES, EightBitSpec, FourBitSpec
from operands import SPECS, fresh_weight, geometry, operands, same_bits, spec_id

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LARGE = (
    *(FourBitSpec("nf4", 100, 8192, blocksize) for blocksize in BLOCKSIZES),
    FourBitSpec("nf4", 2047, 4096),
    FourBitSpec("nf4", 1000, 1000),
    FourBitSpec("nf4", 300, 576),
    FourBitSpec("fp4", 4096, 4096, double_quant=False),
    FourBitSpec("fp4", 513, 4160),
    EightBitSpec("w8_s8", 1000, 4096),
    EightBitSpec("w8_s8", 1000, 1000),
    EightBitSpec("w8_s8", 77, 2048, group_size=64),
)


@pytest.fixture(scope="module", params=[*SPECS, *LARGE], ids=spec_id)
def weight(request, library):
    """(spec, canonical tensors, packed tensors) of a fresh random weight on the GPU."""
    return any_weight(request.param)


def decode(spec, packed, dtype):
    return ops.dequantize(*operands(spec, packed), *geometry(spec), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference_bit_for_bit(weight, dtype):
    spec, canonical, packed = weight
    got = decode(spec, packed, dtype)
    assert same_bits(got, reference.dequantize(spec, canonical, dtype))
    assert same_bits(got, decode(spec, packed, dtype)), "two calls differ"


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_bitsandbytes_bit_for_bit(weight, dtype):
    import bitsandbytes.functional as bnb

    spec, canonical, packed = weight
    got = decode(spec, packed, dtype)
    if isinstance(spec, EightBitSpec):
        if spec.group_size or spec.format != "w8_s8":
            pytest.skip("bitsandbytes has no such format")
        want = bnb.int8_vectorwise_dequant(canonical["codes"], canonical["scale"]).to(dtype)
    else:
        nested = {}
        if spec.double_quant:
            state2 = bnb.QuantState(
                absmax=canonical["nested_absmax"], code=canonical["nested_code"], blocksize=256, dtype=torch.float32
            )
            nested = {"offset": canonical["nested_offset"], "state2": state2}
        state = bnb.QuantState(
            absmax=canonical["absmax"], shape=torch.Size((spec.n, spec.k)), dtype=dtype, blocksize=spec.blocksize,
            code=canonical["code"], quant_type=spec.format, **nested,
        )  # fmt: skip
        want = bnb.dequantize_4bit(canonical["codes"].view(-1, 1), state)
    assert same_bits(got, want.contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_only_the_output_is_written(weight, library, dtype, shift):
    """Sentinels on both sides stay; a start that is not 16-byte aligned takes the scalar stores."""
    spec, canonical, packed = weight
    size, guard = spec.n * spec.k, 64
    buffer = torch.full((size + 2 * guard,), 12345.0, device="cuda").to(dtype)
    sentinel = buffer[0].item()
    out = buffer[guard + shift : guard + shift + size].view(spec.n, spec.k)
    assert library.dequantize(native.describe_weight(spec, *operands(spec, packed)), out)
    assert same_bits(out, reference.dequantize(spec, canonical, dtype))
    assert (buffer[: guard + shift] == sentinel).all() and (buffer[guard + shift + size :] == sentinel).all()


def test_flat_codes_of_a_view_may_start_anywhere(library):
    spec = FourBitSpec("nf4", 50, 100)
    canonical = fresh_weight(spec, device="cuda")
    want = reference.dequantize(spec, canonical, torch.bfloat16)
    for shift in (1, 4, 15):
        buffer = torch.zeros(canonical["codes"].numel() + 32, dtype=torch.uint8, device="cuda")
        codes = buffer[shift : shift + canonical["codes"].numel()]
        codes.copy_(canonical["codes"])
        assert torch.equal(decode(spec, reorder.pack(spec, canonical | {"codes": codes}), torch.bfloat16), want)


def test_tiles_that_start_anywhere(library):
    """The kernels refuse them before a launch; the operator hands them an aligned copy."""
    spec = FourBitSpec("nf4", 16, 64)
    packed = reorder.pack(spec, fresh_weight(spec, device="cuda"))
    shifted = torch.zeros(513, dtype=torch.uint8, device="cuda")[1:].view(1, 1, 512).copy_(packed["qweight"])
    broken = packed | {"qweight": shifted}
    with pytest.raises(native.NativeError, match="aligned"):
        library.dequantize(native.describe_weight(spec, *operands(spec, broken)), torch.empty(16, 64, device="cuda"))
    assert torch.equal(decode(spec, broken, torch.float32), decode(spec, packed, torch.float32))


def test_side_stream_with_a_pending_producer(library):
    """The launch goes to the current stream: the codes it reads are written there just before."""
    spec = FourBitSpec("nf4", 512, 1024)
    canonical = fresh_weight(spec, seed=7, device="cuda")
    packed = reorder.pack(spec, canonical)
    late = packed | {"qweight": torch.zeros_like(packed["qweight"])}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        late["qweight"].copy_(packed["qweight"])
        got = decode(spec, late, torch.bfloat16)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(got, reference.dequantize(spec, canonical, torch.bfloat16))


def test_more_than_two_to_the_31_weights(library):
    """64-bit indices: the last rows of 2^31 + 2^19 weights."""
    spec = FourBitSpec("nf4", 65552, 32768)
    assert spec.n * spec.k > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    packed = {}
    for name, tensor in spec.packed_tensors().items():
        if tensor.dtype == torch.uint8:
            packed[name] = torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device="cuda", generator=generator)
        else:
            packed[name] = torch.rand(tensor.shape, device="cuda", generator=generator)
    got = decode(spec, packed, torch.bfloat16)
    # The last row tile as a weight of its own: its nested scales are the last ones of the whole.
    last = FourBitSpec("nf4", 16, spec.k)
    blocks = last.blocks
    assert blocks % 256 == 0
    tile = packed | {"qweight": packed["qweight"][-1:], "absmax_q": packed["absmax_q"][-1:]}
    tile["nested_absmax"] = packed["nested_absmax"][-blocks // 256 :]
    canonical = reorder.unpack(last, {name: t.contiguous() for name, t in tile.items()})
    assert torch.equal(got[-16:], reference.dequantize(last, canonical, torch.bfloat16))

"""Kernel order: the whole-tensor permutes against the integer maps, and both ways round."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nf4linear import layout, reorder
from nf4linear.formats import BLOCKSIZES, EightBitSpec, FourBitSpec
from operands import SPECS, fresh_weight, spec_id

four_bit = st.builds(
    FourBitSpec,
    format=st.sampled_from(["nf4", "fp4"]),
    n=st.integers(1, 70),
    k=st.one_of(st.integers(1, 300), st.integers(1, 12).map(lambda tiles: 64 * tiles)),
    blocksize=st.sampled_from(BLOCKSIZES[:4]),
    double_quant=st.booleans(),
)
eight_bit = st.one_of(
    st.builds(EightBitSpec, format=st.sampled_from(["w8_s8", "w8_u8"]), n=st.integers(1, 70), k=st.integers(1, 200)),
    st.builds(
        EightBitSpec,
        format=st.just("w8_s8"),
        n=st.integers(1, 40),
        k=st.integers(1, 4).map(lambda groups: 128 * groups),
        group_size=st.sampled_from([64, 128]),
    ),
)


def random_bytes(spec, seed=0):
    """Canonical tensors of arbitrary bytes: reordering must not look at values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, want in spec.canonical_tensors().items():
        raw = torch.randint(0, 256, (want.nbytes(),), dtype=torch.uint8, generator=generator)
        tensors[name] = raw.view(want.dtype).view(want.shape)
    return tensors


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(t):
    return t.contiguous().view(-1).view(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.one_of(four_bit, eight_bit), st.integers(0, 2**31))
def test_unpack_inverts_pack_byte_for_byte(spec, seed):
    canonical = random_bytes(spec, seed)
    packed = reorder.pack(spec, canonical)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in packed.items()} == {
        n: (t.dtype, t.shape) for n, t in spec.packed_tensors().items()
    }
    back = reorder.unpack(spec, packed)
    assert back.keys() == canonical.keys()
    for name in canonical:
        assert same_bytes(back[name], canonical[name]), name


@settings(max_examples=25, deadline=None)
@given(four_bit.filter(lambda spec: spec.layout == "tile16x64"), st.randoms())
def test_four_bit_permutes_follow_the_index_maps(spec, random):
    canonical = random_bytes(spec)
    packed = reorder.pack(spec, canonical)
    qweight, scales = packed["qweight"].view(-1), packed[spec.scales_name].view(-1)
    k_tiles = spec.k // 64
    for _ in range(40):
        row, k = random.randrange(spec.n), random.randrange(spec.k)
        flat = row * spec.k + k
        assert qweight[layout.tile16x64_byte(row, k, spec.k)] == canonical["codes"][flat // 2]
        kb = k // 64
        scale_map = layout.absmax_q_byte if spec.double_quant else layout.row_scale_index
        got, want = scales[scale_map(row, kb, k_tiles)], canonical["absmax"][flat // spec.blocksize]
        assert same_bytes(got, want)
        assert layout.nested_group(row, kb, k_tiles, spec.blocksize) == flat // spec.blocksize // 256


@settings(max_examples=25, deadline=None)
@given(eight_bit, st.randoms())
def test_eight_bit_permutes_follow_the_index_maps(spec, random):
    canonical = random_bytes(spec)
    packed = reorder.pack(spec, canonical)
    for _ in range(40):
        row, k = random.randrange(spec.n), random.randrange(spec.k)
        stored = int(packed["qweight"].view(-1)[layout.tile16x32_byte(row, k, spec.k)])
        value = int(canonical["codes"][row, k])
        assert stored - spec.integer.bias == value
        if spec.group_size:
            index = layout.row_scale_index(row, k // spec.group_size, spec.k // spec.group_size)
            want = canonical["group_scale"][row, k // spec.group_size]
            assert same_bytes(packed["group_scale"].view(-1)[index], want)


def test_padding_rows_decode_to_zero():
    for spec in (FourBitSpec("nf4", 3, 64), FourBitSpec("fp4", 3, 64)):
        qweight = reorder.pack(spec, random_bytes(spec))["qweight"].view(-1)
        for row in range(3, 16):
            assert qweight[layout.tile16x64_byte(row, 10, 64)] == spec.codebook.zero_code * 0x11
    spec = EightBitSpec("w8_s8", 3, 20)
    qweight = reorder.pack(spec, random_bytes(spec))["qweight"].view(-1)
    assert qweight[layout.tile16x32_byte(2, 25, 20)] == 0x80 and qweight[layout.tile16x32_byte(15, 0, 20)] == 0x80


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_every_stored_byte_matters(spec):
    """Flip any byte of a real packed weight: unpack must see it, unless it is padding."""
    canonical = fresh_weight(spec)
    packed = reorder.pack(spec, canonical)
    seen = 0
    for position in range(0, packed["qweight"].numel(), 7):
        broken = packed["qweight"].clone()
        broken.view(-1)[position] ^= 0x11
        seen += not torch.equal(reorder.unpack(spec, packed | {"qweight": broken})["codes"], canonical["codes"])
    real = spec.n * spec.k / (packed["qweight"].numel() * (2 if isinstance(spec, FourBitSpec) else 1))
    assert seen == pytest.approx(real * -(-packed["qweight"].numel() // 7), abs=0.1 * packed["qweight"].numel() / 7)


def test_disagreeing_repeats_are_refused():
    spec = FourBitSpec("nf4", 16, 256, blocksize=128)
    packed = reorder.pack(spec, fresh_weight(spec))
    packed["absmax_q"] = packed["absmax_q"].clone()
    packed["absmax_q"].view(-1)[layout.absmax_q_byte(5, 1, 4)] ^= 1
    with pytest.raises(ValueError, match=r"layer7.*absmax_q.*different scales"):
        reorder.unpack(spec, packed, "layer7")


def test_slices_of_tiles_are_shards():
    """16 output rows or 64 inputs are plain slices: what tensor parallelism and projection fusion rely on."""
    spec = FourBitSpec("nf4", 64, 256)
    canonical = fresh_weight(spec)
    packed = reorder.pack(spec, canonical)
    codes = canonical["codes"].view(64, 128)
    rows = reorder.pack(
        FourBitSpec("nf4", 32, 256, double_quant=False),
        {"codes": codes[32:].reshape(-1), "absmax": torch.zeros(128), "code": canonical["code"]},
    )
    assert torch.equal(packed["qweight"][2:], rows["qweight"])
    columns = reorder.pack(
        FourBitSpec("nf4", 64, 128, double_quant=False),
        {"codes": codes[:, 64:].reshape(-1), "absmax": torch.zeros(128), "code": canonical["code"]},
    )
    assert torch.equal(packed["qweight"][:, 2:], columns["qweight"])

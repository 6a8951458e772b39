"""Tables, shapes and configuration entries."""

import pytest
import torch

from nf4linear.formats import (
    BLOCKSIZES,
    FORMATS,
    EightBitSpec,
    FourBitSpec,
    check_tensors,
    dynamic_map,
    spec_from_config,
)
from operands import SPECS, spec_id

bnb = pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_codebooks_are_those_of_bitsandbytes(name):
    theirs = bnb.functional.get_4bit_type(name, device="cpu")
    ours = torch.tensor(FORMATS[name].code, dtype=torch.float32)
    assert torch.equal(ours, theirs)
    assert FORMATS[name].code[FORMATS[name].zero_code] == 0.0


def test_codebook_values_are_exact_in_float32():
    for name in ("nf4", "fp4"):
        values = torch.tensor(FORMATS[name].code, dtype=torch.float64)
        assert torch.equal(values, values.float().double())


def test_dynamic_map_is_that_of_bitsandbytes():
    ours = torch.tensor(dynamic_map(), dtype=torch.float32)
    assert torch.equal(ours, bnb.functional.create_dynamic_map())
    assert ours.numel() == 256 and torch.all(ours[1:] > ours[:-1])


def test_shapes_by_hand():
    tiled = FourBitSpec("nf4", 17, 320, 64)
    assert tiled.layout == "tile16x64"
    shapes = {name: spec.shape for name, spec in tiled.packed_tensors().items()}
    assert shapes == {
        "qweight": (2, 5, 512),
        "absmax_q": (2, 2, 64),
        "code": (16,),
        "nested_absmax": (1,),
        "nested_code": (256,),
        "nested_offset": (),
    }
    flat = FourBitSpec("nf4", 7, 33, 64, double_quant=False)
    assert flat.layout == "flat"
    assert {n: s.shape for n, s in flat.packed_tensors().items()} == {"qweight": (116,), "absmax": (4,), "code": (16,)}
    eight = EightBitSpec("w8_s8", 17, 33)
    assert {n: s.shape for n, s in eight.packed_tensors().items()} == {"qweight": (2, 2, 512), "scale": (17,)}


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_layout_is_tiled_only_where_blocks_stay_in_rows(blocksize):
    for k in (32, 64, 96, 128, 4096, 4160, 8192):
        tiled = FourBitSpec("nf4", 3, k, blocksize).layout == "tile16x64"
        assert tiled == (blocksize >= 64 and k % blocksize == 0)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_config_round_trip(spec):
    assert spec_from_config(spec.to_config(), spec.n, spec.k) == spec


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"format": "int3"}, "int3"),
        ({}, "None"),
        ({"format": "nf4", "group_size": 64}, "group_size"),
        ({"format": "nf4", "blocksize": 48}, "48"),
        ({"format": "w8_s8", "group_size": 32}, "32"),
        ({"format": "w8_s8", "blocksize": 64}, "blocksize"),
    ],
)
def test_config_refusals_name_the_entry(entry, words):
    with pytest.raises(ValueError, match=words):
        spec_from_config(entry, 64, 128)


@pytest.mark.parametrize(("n", "k"), [(0, 64), (64, 0), (-1, 64)])
def test_empty_shapes_are_refused(n, k):
    with pytest.raises(ValueError, match="positive"):
        FourBitSpec("nf4", n, k)
    with pytest.raises(ValueError, match="positive"):
        EightBitSpec("w8_s8", n, k)


def test_check_tensors_names_what_is_wrong():
    spec = EightBitSpec("w8_s8", 16, 32)
    good = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in spec.packed_tensors().items()}
    check_tensors(good, spec.packed_tensors(), "layer")
    for broken, words in (
        ({"qweight": good["qweight"]}, "scale.*missing"),
        (good | {"scale": good["scale"].half()}, "float16"),
        (good | {"scale": good["scale"][1:]}, r"\[15\]"),
        (good | {"more": good["scale"]}, "more"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            check_tensors(broken, spec.packed_tensors(), "model.layer3")
        assert "model.layer3" in str(caught.value)

"""pack and unpack: every byte of a bitsandbytes checkpoint comes back, and what lies between means the same weights."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from pathlib import Path

import bitsandbytes.functional as bnb_functional
import pytest
import torch
from bitsandbytes.functional import QuantState
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import nf4linear  # noqa: F401 - registers the packed format
from checkpoints import INT8, NF4, ODD, Q_PROJ, TILED, edit, edit_json, files, save_bnb, save_plain, tensors
from nf4linear import reference, reorder
from nf4linear.checkpoint import (
    PackedFolder,
    describe,
    pack_checkpoint,
    shard_plan,
    shards,
    unpack_checkpoint,
    validate_packed,
)
from nf4linear.formats import EightBitSpec, FourBitSpec

KINDS = {
    "nf4": NF4,
    "nf4-plain-absmax": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    "int8": INT8,
    **{f"nf4-{s}-storage": NF4 | {"bnb_4bit_quant_storage": s} for s in ("bfloat16", "float16", "float32", "float64")},
}


def pack(src: Path, dst: Path, **options):
    return pack_checkpoint(src, dst, progress=False, **options)


def unpack(src: Path, dst: Path, **options):
    return unpack_checkpoint(src, dst, progress=False, **options)


def round_trip(src: Path, tmp_path: Path, **options) -> Path:
    pack(src, tmp_path / "packed", **options)
    validate_packed(tmp_path / "packed")
    result = unpack(tmp_path / "packed", tmp_path / "back")
    assert result.exact
    return tmp_path / "back"


@pytest.fixture(scope="module")
def nf4(tmp_path_factory) -> Path:
    return save_bnb(tmp_path_factory.mktemp("nf4") / "model", **NF4)


@pytest.fixture(scope="module")
def int8(tmp_path_factory) -> Path:
    return save_bnb(tmp_path_factory.mktemp("int8") / "model", **INT8)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return save_plain(tmp_path_factory.mktemp("plain") / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_comes_back(kind, tmp_path):
    src = save_bnb(tmp_path / "src", **KINDS[kind])
    assert files(round_trip(src, tmp_path)) == files(src)


@pytest.mark.parametrize("options", [NF4, KINDS["nf4-plain-absmax"], INT8], ids=["nf4", "nf4-plain-absmax", "int8"])
def test_odd_shapes_come_back(options, tmp_path):
    src = save_bnb(tmp_path / "src", ODD, **options)
    assert files(round_trip(src, tmp_path)) == files(src)
    packed = shards.read_header(tmp_path / "packed" / "model.safetensors")
    unaligned = [entry.key for entry in packed.entries if entry.begin % entry.torch_dtype.itemsize]
    assert not unaligned and packed.data_start % 8 == 0, "readers that map the file need aligned tensors"


def test_shards_come_back(tmp_path):
    src = save_bnb(tmp_path / "src", max_shard_size="6KB", **NF4)
    assert len(list(src.glob("*.safetensors"))) > 3
    assert files(round_trip(src, tmp_path, max_shard_size="9KB")) == files(src)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 3
    assert (tmp_path / "packed" / "model.safetensors.index.json").is_file()


def test_statistics_may_lie_in_another_shard_than_the_weight(nf4, tmp_path):
    src = shutil.copytree(nf4, tmp_path / "src")
    held = tensors(src)
    (src / "model.safetensors").unlink()
    names = {key: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, key in enumerate(held)}
    for name in set(names.values()):
        save_file(
            {key: held[key] for key in held if names[key] == name}, src / name, {"format": "pt", "b": "2", "a": "1"}
        )
    (src / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert names[Q_PROJ + ".weight"] != names[Q_PROJ + ".weight.absmax"]
    assert files(round_trip(src, tmp_path)) == files(src)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_statistics_come_back(dtype, nf4, tmp_path):
    src = shutil.copytree(nf4, tmp_path / "src")
    names = ("quant_map", "nested_absmax", "nested_quant_map")
    edit(src, lambda held: held.update({k: t.to(dtype) for k, t in held.items() if k.endswith(names)}))
    back = round_trip(src, tmp_path)
    assert files(back) == files(src)
    packed = tensors(tmp_path / "packed")
    assert torch.equal(packed[Q_PROJ + ".nested_absmax"], tensors(src)[Q_PROJ + ".weight.nested_absmax"].float())


def test_table_rounded_to_16_bit_but_stored_wide_comes_back(nf4, tmp_path):
    src = shutil.copytree(nf4, tmp_path / "src")
    edit(src, lambda held: held.update({k: t.bfloat16().float() for k, t in held.items() if k.endswith(".quant_map")}))
    assert files(round_trip(src, tmp_path)) == files(src)


def test_8_bit_without_weight_format_comes_back(int8, tmp_path):
    src = shutil.copytree(int8, tmp_path / "src")
    edit(src, lambda held: [held.pop(key) for key in list(held) if key.endswith("weight_format")])
    assert files(round_trip(src, tmp_path)) == files(src)


def test_quantized_head_stays_quantized(tmp_path):
    src = save_bnb(tmp_path / "src", **NF4, llm_int8_skip_modules=["q_proj"])
    assert "lm_head.weight.absmax" in tensors(src)
    back = round_trip(src, tmp_path)
    assert files(back) == files(src)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert sorted(config["modules_to_not_convert"]) == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]


def test_narrow_nested_dtype_is_kept_and_told(nf4, tmp_path):
    src = shutil.copytree(nf4, tmp_path / "src")

    def rename(held):
        for key in [key for key in held if ".quant_state." in key]:
            text = bytes(held[key].tolist()).replace(b'"nested_dtype": "float32"', b'"nested_dtype": "bfloat16"')
            held[key] = torch.tensor(list(text), dtype=torch.uint8)

    edit(src, rename)
    assert "16-bit nested_dtype" in " ".join(pack(src, tmp_path / "packed").notes)
    unpack(tmp_path / "packed", tmp_path / "back")
    assert files(tmp_path / "back") == files(src)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4-plain-absmax"])
def test_packed_4_bit_weights_are_bitsandbytes_weights(kind, tmp_path):
    src = save_bnb(tmp_path / "src", **KINDS[kind])
    pack(src, tmp_path / "packed")
    held = tensors(src)
    with PackedFolder(tmp_path / "packed") as packed:
        assert len(packed.layers) == 14
        for name in packed.layers:
            spec = packed.known_spec(name)
            if spec.k % spec.blocksize:
                continue  # bitsandbytes 0.50.2 is wrong there on a CPU; tests/test_reference.py has the whole story
            ours = reference.dequantize(spec, reorder.unpack(spec, packed.tensors(name)), torch.float32)
            stats = {k.removeprefix(name + ".weight."): t for k, t in held.items() if k.startswith(name + ".weight.")}
            state = QuantState.from_dict(stats, torch.device("cpu"))
            state.dtype = torch.float32
            theirs = bnb_functional.dequantize_4bit(held[name + ".weight"], state)
            assert torch.equal(ours, theirs), name


def test_packed_8_bit_weights_are_bitsandbytes_weights(int8, tmp_path):
    pack(int8, tmp_path / "packed")
    held = tensors(int8)
    with PackedFolder(tmp_path / "packed") as packed:
        for name in packed.layers:
            spec = packed.known_spec(name)
            ours = reference.dequantize(spec, reorder.unpack(spec, packed.tensors(name)), torch.float32)
            theirs = bnb_functional.int8_vectorwise_dequant(held[name + ".weight"], held[name + ".SCB"])
            assert torch.equal(ours, theirs), name


def test_packed_folder_is_what_the_format_says(nf4, tmp_path):
    pack(nf4, tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "nf4linear" and config["format_version"] == 1
    assert config["modules"] == {"default": {"format": "nf4", "blocksize": 64, "double_quant": True}}
    assert config["modules_to_not_convert"] == ["lm_head"]
    held = tensors(tmp_path / "packed")
    assert not any(key.endswith("_proj.weight") for key in held), "transformers would load it without nf4linear"
    expected = FourBitSpec("nf4", 64, 64).packed_tensors()
    assert {k: (t.dtype, tuple(t.shape)) for k, t in held.items() if k.startswith(Q_PROJ)} == {
        f"{Q_PROJ}.{part}": (spec.dtype, spec.shape) for part, spec in expected.items()
    }
    shard = shards.read_header(tmp_path / "packed" / "model.safetensors")
    assert shard.metadata == {"format": "pt", "nf4linear_format_version": "1"}
    source = json.loads((tmp_path / "packed" / "nf4linear_source.json").read_text())
    layer = source["layers"][Q_PROJ]
    assert (
        layer["layout"] == "tile16x64" and layer["quant_storage"] == "uint8" and layer["quant_map_dtype"] == "float32"
    )
    assert json.loads(layer["quant_state"])["shape"] == [64, 64]


def test_small_files_and_card_travel(nf4, tmp_path):
    src = shutil.copytree(nf4, tmp_path / "src")
    (src / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: some/base\n---\n# Their card: $5\n")
    (src / "tokenizer.json").write_text("{}")
    (src / "chat_template.jinja").write_text("{{ x }}")
    (src / "additional_chat_templates").mkdir()
    (src / "additional_chat_templates" / "tool.jinja").write_text("t")
    (src / "pytorch_model.bin").write_bytes(b"pickle")
    pack(src, tmp_path / "packed")
    card = (tmp_path / "packed" / "README.md").read_text()
    assert "license: apache-2.0" in card and "base_model: some/base" in card and "import nf4linear" in card
    assert re.search(r"Weights in quantized layers \| [\d,]+, in [\d.]+ kB with their scales", card)
    assert not (tmp_path / "packed" / "pytorch_model.bin").exists()
    unpack(tmp_path / "packed", tmp_path / "back")
    (src / "pytorch_model.bin").unlink()
    assert files(tmp_path / "back") == files(src)


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, FourBitSpec("nf4", 64, 64)),
        ({"format": "fp4", "double_quant": False}, FourBitSpec("fp4", 64, 64, double_quant=False)),
        ({"blocksize": 32}, FourBitSpec("nf4", 64, 64, 32)),
        ({"format": "w8_s8"}, EightBitSpec("w8_s8", 64, 64)),
    ],
    ids=["default", "fp4", "blocksize", "w8"],
)
def test_plain_checkpoint_is_quantized(options, spec, plain, tmp_path):
    result = pack(plain, tmp_path / "packed", **options)
    assert result.layers == 14 and result.bytes_after < result.bytes_before
    held = tensors(tmp_path / "packed")
    expected = reorder.pack(spec, reference.quantize(spec, tensors(plain)[Q_PROJ + ".weight"]))
    for part, tensor in expected.items():
        assert torch.equal(held[f"{Q_PROJ}.{part}"], tensor), part
    assert torch.equal(held["lm_head.weight"], tensors(plain)["lm_head.weight"])


def test_plain_unpacks_to_a_checkpoint_that_bitsandbytes_loads(nf4, plain, tmp_path):
    pack(plain, tmp_path / "packed")
    assert not unpack(tmp_path / "packed", tmp_path / "back").exact
    theirs, back = tensors(nf4), tensors(tmp_path / "back")
    assert back.keys() == theirs.keys()
    assert {key: (t.dtype, t.shape) for key, t in back.items() if ".quant_state." not in key} == {
        key: (t.dtype, t.shape) for key, t in theirs.items() if ".quant_state." not in key
    }
    # Scale codes may differ near ties, where bitsandbytes' compiled CPU quantizer is an approximation.
    for key in theirs:
        if key.endswith(("proj.weight", "map")):
            assert torch.equal(back[key], theirs[key]), key
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = AutoModelForCausalLM.from_pretrained(nf4, dtype=torch.float32)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=0.02)


def test_dequantize_writes_a_plain_checkpoint(nf4, tmp_path):
    pack(nf4, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "back", dequantize="float32")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    with PackedFolder(tmp_path / "packed") as packed:
        spec = packed.known_spec(Q_PROJ)
        expected = reference.dequantize(spec, reorder.unpack(spec, packed.tensors(Q_PROJ)), torch.float32)
    assert torch.equal(tensors(tmp_path / "back")[Q_PROJ + ".weight"], expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.float32


@pytest.mark.parametrize("source", ["nf4", "int8"])
def test_synthesize_needs_no_source_record(source, request, tmp_path):
    src = request.getfixturevalue(source)
    pack(src, tmp_path / "packed")
    (tmp_path / "packed" / "nf4linear_source.json").unlink()
    with pytest.raises(ValueError, match="--synthesize"):
        unpack(tmp_path / "packed", tmp_path / "back")
    assert not unpack(tmp_path / "packed", tmp_path / "back", synthesize=True).exact
    pack(tmp_path / "back", tmp_path / "again")
    first, again = tensors(tmp_path / "packed"), tensors(tmp_path / "again")
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)


def test_skip_adds_to_the_defaults(plain, tmp_path):
    pack(plain, tmp_path / "packed", skip=["mlp", "*.1.self_attn.q_proj"])
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    held = tensors(tmp_path / "packed")
    assert {"lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"} <= set(
        config["modules_to_not_convert"]
    )
    assert "model.layers.1.self_attn.q_proj.weight" in held and Q_PROJ + ".qweight" in held
    with pytest.raises(ValueError, match=r"'mpl' names no module.*mlp"):
        pack(plain, tmp_path / "other", skip=["mpl"])


def test_tied_head_stays_unless_asked(tmp_path):
    plain = save_plain(tmp_path / "plain", tied=True)
    pack(plain, tmp_path / "packed")
    assert not any(key.startswith("lm_head") for key in tensors(tmp_path / "packed"))
    result = pack(plain, tmp_path / "w8", lm_head="w8")
    held = tensors(tmp_path / "w8")
    config = json.loads((tmp_path / "w8" / "config.json").read_text())
    assert "tied" in " ".join(result.notes) and config["tie_word_embeddings"] is False
    assert config["quantization_config"]["modules"]["lm_head"] == {"format": "w8_s8", "group_size": None}
    assert torch.equal(held["model.embed_tokens.weight"], tensors(plain)["model.embed_tokens.weight"])
    assert "lm_head.qweight" in held
    unpack(tmp_path / "w8", tmp_path / "back")
    assert "lm_head.weight" not in tensors(tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is True


def test_tied_head_of_a_bitsandbytes_model_goes_and_comes(tmp_path):
    src = save_bnb(tmp_path / "src", tied=True, **NF4)
    assert files(round_trip(src, tmp_path, lm_head="w8")) == files(src)


def test_untied_head_in_8_bit_is_said_not_to_come_back(nf4, tmp_path):
    pack(nf4, tmp_path / "packed", lm_head="w8")
    result = unpack(tmp_path / "packed", tmp_path / "back")
    assert not result.exact and "lm_head.weight" in result.notes[0]
    head, was = tensors(tmp_path / "back")["lm_head.weight"], tensors(nf4)["lm_head.weight"]
    assert head.dtype == was.dtype and not torch.equal(head, was)
    torch.testing.assert_close(head.float(), was.float(), rtol=0, atol=was.float().abs().max().item() / 200)


def test_conv1d_weights_are_transposed(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64, n_positions=32))
    model.save_pretrained(tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    weight = model.transformer.h[0].attn.c_attn.weight.detach()
    spec = FourBitSpec("nf4", 192, 64)
    key = next(key for key in tensors(tmp_path / "packed") if key.endswith("attn.c_attn.qweight"))
    assert torch.equal(
        tensors(tmp_path / "packed")[key], reorder.pack(spec, reference.quantize(spec, weight.T))["qweight"]
    )
    unpack(tmp_path / "packed", tmp_path / "back", dequantize="float32")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "back").transformer.h[0].attn.c_attn.weight
    torch.testing.assert_close(loaded.detach(), weight, rtol=0, atol=weight.abs().max().item() / 4)


@pytest.mark.parametrize("lm_head", [None, "w8"])
def test_modules_with_other_names_than_their_keys(lm_head, tmp_path):
    """Vision-language checkpoints: transformers renames keys while loading, and config.json must name the modules."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
    text = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=64, head_dim=32)
    vision = CLIPVisionConfig(**sizes, image_size=28, patch_size=14, projection_dim=64)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    assert "language_model.lm_head.weight" in tensors(tmp_path / "plain"), "the case this test is for"
    pack(tmp_path / "plain", tmp_path / "packed", lm_head=lm_head)
    unpack(tmp_path / "packed", tmp_path / "bnb")
    pack(tmp_path / "bnb", tmp_path / "again")
    first, again = tensors(tmp_path / "packed"), tensors(tmp_path / "again")
    for key in again:
        if not key.startswith("language_model.lm_head."):
            assert torch.equal(first[key], again[key]), key
    config = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head"]
    ids = torch.arange(8)[None]
    logits = [
        LlavaForConditionalGeneration.from_pretrained(tmp_path / name)(ids).logits.float() for name in ("packed", "bnb")
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=0.05 * logits[0].abs().max().item())


def test_a_folder_saved_by_transformers_still_unpacks_byte_for_byte(nf4, tmp_path):
    pack(nf4, tmp_path / "packed")
    AutoModelForCausalLM.from_pretrained(tmp_path / "packed").save_pretrained(tmp_path / "saved")
    validate_packed(tmp_path / "saved")
    assert unpack(tmp_path / "saved", tmp_path / "back").exact
    assert files(tmp_path / "back")["model.safetensors"] == files(nf4)["model.safetensors"]


def test_one_layer_at_a_time_is_in_memory(tmp_path, monkeypatch):
    """A layer's tensors are written before the next one is read, and nobody keeps them."""
    src = save_bnb(tmp_path / "src", **NF4)
    alive: list[tuple[str, weakref.ref]] = []
    most = 0
    write = shard_plan.ShardWriter.write

    def layer_of(key: str) -> str:
        return key.partition("_proj")[0]

    def spy_write(self, key, tensor):
        nonlocal most
        alive.append((layer_of(key), weakref.ref(tensor)))
        most = max(most, len({layer for layer, ref in alive if ref() is not None}))
        write(self, key, tensor)

    monkeypatch.setattr(shard_plan.ShardWriter, "write", spy_write)
    pack(src, tmp_path / "packed")
    assert len(alive) == 14 * 6 and most == 1
    alive.clear()
    unpack(tmp_path / "packed", tmp_path / "back")
    assert len(alive) == 14 * 6 and most == 1


def test_describe_counts_bytes(nf4, int8, plain, tmp_path):
    pack(nf4, tmp_path / "packed")
    packed, source = describe(tmp_path / "packed"), describe(nf4)
    assert packed.kind == "packed" and packed.restores_source and packed.skipped == ["lm_head"] and not packed.problems
    assert packed.formats == source.formats == {"nf4, blocksize 64, double quantization": 14}
    assert packed.quantized_weights == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    total = packed.bytes_codes + packed.bytes_scales + packed.bytes_other
    assert total == sum(t.nbytes for t in tensors(tmp_path / "packed").values())
    assert source.kind == "bitsandbytes" and source.bytes_codes == source.quantized_weights // 2
    assert describe(int8).formats == {"w8_s8, one scale a row": 14}
    assert describe(plain).kind == "plain" and describe(plain).bits_per_weight is None


def test_module_rules(nf4, tmp_path):
    pack(nf4, tmp_path / "packed")
    exact, long, short = ({"format": "nf4", "blocksize": b, "double_quant": True} for b in (64, 128, 256))
    modules = {"*proj": short, "model.layers.*proj": long, Q_PROJ: exact, "default": short}
    edit_json(tmp_path / "packed" / "config.json", lambda c: c["quantization_config"].update(modules=modules))
    with PackedFolder(tmp_path / "packed") as packed:
        assert packed.rules.entry(Q_PROJ) == exact
        assert packed.rules.entry("model.layers.7.mlp.up_proj") == long
        assert packed.rules.entry("vision.up_proj") == short


def test_builders_make_what_they_say(nf4):
    assert TILED["intermediate_size"] % 64 != 0 and tensors(nf4)[Q_PROJ + ".weight"].shape == (64 * 64 // 2, 1)

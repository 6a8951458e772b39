"""Faults that users of quantized linear layers have reported elsewhere, tried on ours. Each test names a thread.

Most of the faults are covered where their subject is tested; these go through whole models.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
import warnings
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import nf4linear
from nf4linear import NF4Linear, PackedLinear, W8Linear
from tiny_models import auto_class, logits

patch = functools.partial(nf4linear.patch_model, progress=False)


def load(folder, architecture="llama", **options) -> nn.Module:
    return auto_class(architecture).from_pretrained(folder, **options)


def packed(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def packed_bytes(model: nn.Module) -> dict[str, torch.Tensor]:
    layers = packed(model).items()
    return {f"{name}.{part}": t.detach().clone() for name, layer in layers for part, t in layer.packed().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


# ---- loading and saving ------------------------------------------------------------------------------------


def test_a_loaded_bitsandbytes_model_can_be_saved_again(tiny_bnb, tmp_path):
    """github.com/huggingface/transformers/pull/45743: save_pretrained of a loaded model raised."""
    model = patch(load(tiny_bnb()))
    model.save_pretrained(tmp_path / "a")
    load(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert same(load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors"))


def edited_copy(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)
    return target


LAYER = "model.layers.1.mlp.up_proj"


def swap_shape(tensors: dict[str, torch.Tensor]) -> None:
    key = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[key].tolist()))
    state["shape"] = [*state["shape"][:1], state["shape"][1] + 1]
    tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: [t.pop(f"{LAYER}.weight.nested_absmax"), t.pop(f"{LAYER}.weight.nested_quant_map")],
        lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"][:100].clone()}),
        lambda t: t.update({f"{LAYER}.weight.quant_map": t[f"{LAYER}.weight.quant_map"][:15].clone()}),
        lambda t: t.update({f"{LAYER}.weight.absmax": t[f"{LAYER}.weight.absmax"][:-1].clone()}),
        swap_shape,
    ],
    ids=["nested statistics", "weight", "quant_map", "absmax", "shape"],
)
def test_damaged_bitsandbytes_checkpoints_are_refused_by_name(tiny_bnb, tmp_path, change):
    """bitsandbytes takes 8-bit scale codes for scales when the second-level statistics are absent."""
    folder = edited_copy(tiny_bnb(), tmp_path / "damaged", change)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        patch(load(folder))
    if isinstance(caught.value, ValueError):
        assert LAYER in str(caught.value)


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
def test_weights_stored_as_floats_are_taken_as_bytes(tiny_bnb, storage):
    """github.com/vllm-project/vllm/issues/10590: quant_storage other than uint8."""
    want = packed_bytes(patch(load(tiny_bnb())))
    folder = tiny_bnb(bnb_4bit_quant_storage=storage)
    for dtype in ("auto", torch.float16):
        assert same(packed_bytes(patch(load(folder, dtype=dtype))), want)


def test_statistics_in_another_shard_than_the_weight(tiny_bnb, tiny, tmp_path):
    """github.com/huggingface/transformers/issues/40327."""
    from tiny_models import bnb_config

    load(tiny(), quantization_config=bnb_config()).save_pretrained(tmp_path, max_shard_size="3KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 10
    assert same(packed_bytes(patch(load(tmp_path))), packed_bytes(patch(load(tiny_bnb()))))


def test_a_config_that_lost_its_quantization_is_not_guessed(tiny_packed, tmp_path):
    """github.com/ModelCloud/GPTQModel/issues/1211: nothing but config.json says how to read the tensors."""
    folder = Path(shutil.copytree(tiny_packed(), tmp_path / "lost"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    model, info = auto_class("llama").from_pretrained(folder, output_loading_info=True)
    assert f"{LAYER}.weight" in info["missing_keys"] and f"{LAYER}.qweight" in info["unexpected_keys"]
    assert not packed(model)


def test_loading_under_a_16bit_default_dtype(tiny_bnb, tiny_packed):
    """github.com/bitsandbytes-foundation/bitsandbytes/pull/1971: the nested offset became bfloat16."""
    want = packed_bytes(load(tiny_packed()))
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours, live = load(tiny_packed()), load(tiny_bnb())
        offset = live.model.layers[1].mlp.up_proj.weight.quant_state.offset
        with warnings.catch_warnings(record=True) as remarks:
            warnings.simplefilter("always")
            theirs = patch(live)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(packed_bytes(ours), want)
    rounded = offset.dtype != torch.float32
    assert any("nested offsets were rounded" in str(remark.message) for remark in remarks) == rounded
    assert {tensor.dtype for tensor in packed_bytes(theirs).values()} == {torch.uint8, torch.float32}
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=0.1, atol=0.02)


# ---- casts and moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cast", ["half", "float", "bfloat16", "to16", "submodule", "type"])
def test_no_cast_of_a_model_touches_codes_or_scales(tiny_packed, bits, cast):
    """github.com/huggingface/transformers/issues/38717 and others: casts of quantized models corrupted them."""
    model = load(tiny_packed(bits=bits))
    before = packed_bytes(model)
    casts = {
        "half": lambda: model.half(),
        "float": lambda: model.float(),
        "bfloat16": lambda: model.bfloat16(),
        "to16": lambda: model.to(torch.float16),
        "submodule": lambda: model.model.half(),
        "type": lambda: model.type(torch.float16),
    }
    try:
        casts[cast]()
    except ValueError as error:  # transformers' own guards
        assert "quantized" in str(error)
    assert same(packed_bytes(model), before)
    nn.Module.to(model, torch.float16)
    assert same(packed_bytes(model), before) and logits(model).dtype == torch.float16


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_can_be_moved(tiny_bnb, bits):
    """github.com/bitsandbytes-foundation/bitsandbytes/issues/1815: .to(device) was refused."""
    import accelerate

    model = patch(load(tiny_bnb(bits=bits)))
    want = logits(model)
    assert torch.equal(logits(model.to("cpu")), want) and torch.equal(logits(model.cpu()), want)
    assert torch.equal(logits(accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu")), want)


# ---- numbers -----------------------------------------------------------------------------------------------


def test_8bit_layers_neither_cast_nor_log(caplog, capfd):
    """github.com/huggingface/peft/issues/2424: a line for every matmul, and bfloat16 went through float16."""
    layer = W8Linear.from_linear(nn.Linear(64, 64).bfloat16())
    layer(torch.zeros(1, 64, dtype=torch.bfloat16))  # what a first use may have to say
    caplog.clear(), capfd.readouterr()
    for _ in range(3):
        y = layer(torch.full((2, 64), 1e5, dtype=torch.bfloat16))
        assert y.isfinite().all() and y.dtype == torch.bfloat16
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_weight_beyond_float16_keeps_its_row():
    """bitsandbytes quantizes to 8 bit through float16: the scale becomes infinite, the row zero."""
    linear = nn.Linear(64, 8, bias=False).bfloat16()
    with torch.no_grad():
        linear.weight[0, 0] = 1e5
    layer = W8Linear.from_linear(linear)
    error = (layer.dequantize(torch.float32) - linear.weight.float()).abs()
    assert layer.scale.isfinite().all() and (error <= layer.scale[:, None] / 254 * 1.001).all()


@pytest.mark.parametrize("make", [NF4Linear.from_linear, W8Linear.from_linear])
def test_zero_and_subnormal_blocks(make):
    linear = nn.Linear(64, 96)
    with torch.no_grad():
        linear.weight[:64] = 0
        linear.weight[64:80] = 1e-40
    layer = make(linear, **({"double_quant": False} if make.__self__ is NF4Linear else {}))
    x = torch.randn(3, 64)
    y = layer(x)
    assert torch.equal(y[:, :64], linear.bias[:64].expand(3, -1)) and y.isfinite().all()


def test_a_float32_compute_dtype_is_remarked_once(tiny_bnb):
    """github.com/bitsandbytes-foundation/bitsandbytes/pull/2077: the default compute dtype means a slow path."""
    model = load(tiny_bnb(bnb_4bit_compute_dtype=torch.float32))
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        patch(model)
    assert sum("compute_dtype" in str(remark.message) for remark in remarks) == 1
    assert logits(model).dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_row_at_every_batch_size(tiny_packed, bits):
    """github.com/bitsandbytes-foundation/bitsandbytes/issues/28: the kernel chosen by the batch changed the text."""
    layer = next(iter(packed(load(tiny_packed(bits=bits))).values()))
    x = torch.randn(64, layer.in_features, dtype=torch.bfloat16)
    exact = x.double() @ layer.dequantize(torch.float32).double().T
    bound = (F.linear(x, layer.dequantize(torch.bfloat16)).double() - exact).abs().max()
    for m in (1, 2, 3, 4, 5, 8, 17, 64):
        y = layer(x[:m])
        assert (y.double() - exact[:m]).abs().max() <= 1.5 * bound
        assert torch.equal(y, layer(x[:m]))


# ---- adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], "all-linear"])
@pytest.mark.parametrize("bits", [4, 8])
def test_lora_trains_on_top(tiny_packed, tmp_path, bits, targets):
    """github.com/huggingface/peft: other layers are refused as targets, or found by no name."""
    model = load(tiny_packed(bits=bits), dtype=torch.float32)
    before = packed_bytes(model)
    want = logits(model)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    wrapped = sum(isinstance(module, peft.tuners.lora.Linear) for module in adapted.modules())
    assert wrapped == (14 if targets == "all-linear" else 4)
    assert not torch.allclose(logits(adapted), want)
    ids = torch.arange(3, 21).view(2, 9)
    adapted.train()
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    adapted.eval()
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(tiny_packed(bits=bits), dtype=torch.float32), tmp_path)
    assert torch.equal(logits(again), logits(adapted))
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), want)
    assert same(packed_bytes(adapted.unload()), before)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_a_merge_is_refused_and_changes_nothing(tiny_packed, safe, merge):
    """github.com/huggingface/peft/issues/2501: merging must not be lost in a temporary."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(load(tiny_packed()), config)
    want = logits(adapted)
    act = getattr(adapted, merge)
    with pytest.raises((RuntimeError, AttributeError), match=r"model\.layers\.0\.self_attn\.q_proj"):
        act(safe_merge=safe)
    assert torch.equal(logits(adapted), want)


def test_copies_of_whole_models_are_independent(tiny_packed):
    """github.com/huggingface/accelerate/issues/2248: deepcopy failed or changed the source."""
    model = load(tiny_packed())
    want = logits(model)
    other = copy.deepcopy(model)
    for layer in packed(other).values():
        layer.qweight.data.zero_()
    assert torch.equal(logits(model), want) and not torch.equal(logits(other), want)

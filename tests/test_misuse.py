"""Layers and models in the hands of careless, hostile and unlucky users: nothing may crash, or be wrong in silence."""

from __future__ import annotations

import functools

import numpy as np
import peft
import pytest
import torch
from torch import nn

import nf4linear
from nf4linear import NF4Linear, PackedLinear, W8Linear, native, reorder
from tiny_models import auto_class, logits, tiny_config

patch = functools.partial(nf4linear.patch_model, progress=False)
K, N = 192, 40


@pytest.fixture
def layer() -> NF4Linear:
    torch.manual_seed(0)
    return NF4Linear.from_linear(nn.Linear(K, N).requires_grad_(False))


def expected(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, layer.dequantize(x.dtype), layer.bias)


def packed_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


# ---- one layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.jacrev])
def test_jacobians_are_the_weight(layer, transform):
    """Forward mode once gave zeros without a word."""
    torch.testing.assert_close(transform(layer)(torch.randn(K)), layer.dequantize(torch.float32))


def test_vmap_of_a_gradient(layer):
    gradient = torch.vmap(torch.func.grad(lambda x: layer(x).sum()))(torch.randn(5, K))
    torch.testing.assert_close(gradient, layer.dequantize(torch.float32).sum(0).expand(5, K))


@pytest.mark.parametrize("size", [1, N - 1, N + 1])
def test_a_bias_of_another_size_is_refused_not_read(layer, size):
    layer.bias = nn.Parameter(torch.zeros(size), requires_grad=False)
    with pytest.raises(ValueError, match=rf"bias is \[{size}\]"):
        layer(torch.randn(3, K))


@pytest.mark.parametrize("name", ["qweight", "absmax_q", "nested_code", "nested_absmax"])
def test_a_weight_tensor_of_another_size_is_refused_not_read(layer, name):
    short = layer.packed()[name].flatten()[:0].clone()
    with pytest.raises(ValueError, match=rf"{name} is .* expected"):
        torch.func.functional_call(layer, {name: short}, (torch.randn(3, K),))


def at_an_odd_byte(t: torch.Tensor) -> torch.Tensor:
    memory = bytearray(t.nbytes + 1)
    array = np.ndarray(tuple(t.shape), t.numpy().dtype, memory, offset=1)
    array[...] = t.numpy()
    return torch.from_numpy(array)


def test_an_input_at_an_odd_byte(layer):
    x = torch.randn(3, K)
    torch.testing.assert_close(layer(at_an_odd_byte(x)), layer(x))


def test_a_bias_at_an_odd_byte(layer):
    x = torch.randn(3, K)
    want = layer(x)
    layer.load_state_dict(layer.state_dict() | {"bias": at_an_odd_byte(layer.bias.detach())}, assign=True)
    torch.testing.assert_close(layer(x), want)


def test_a_tensor_cut_out_of_another_can_be_assigned(layer):
    x = torch.randn(3, K)
    want = layer(x)
    state = layer.state_dict()
    state["qweight"] = torch.cat([state["qweight"]] * 2, dim=-1)[..., : state["qweight"].shape[-1]]
    layer.load_state_dict(state, assign=True)
    torch.testing.assert_close(layer(x), want)


@pytest.mark.parametrize("group_size", [None, 64])
def test_rows_whose_reciprocal_overflows(group_size):
    linear = nn.Linear(64, 4, bias=False)
    linear.weight.data[1] = 0.0
    linear.weight.data[2] *= 1e-36
    layer = W8Linear.from_linear(linear, group_size=group_size)
    codes = reorder.unpack(layer.spec, layer.packed())["codes"]
    assert not codes[1].any()
    assert codes[2].unique().numel() > 10  # infinity times anything would be the largest code


@pytest.mark.parametrize(("make", "name"), [
    (NF4Linear.from_linear, "nested_absmax"),
    (functools.partial(NF4Linear.from_linear, double_quant=False), "absmax"),
    (W8Linear.from_linear, "scale"),
])  # fmt: skip
def test_scales_that_are_not_finite_are_refused(make, name):
    layer = make(nn.Linear(K, N))
    tensors = {part: tensor.detach().clone() for part, tensor in layer.packed().items()}
    tensors[name].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=f"{name}' holds NaN"):
        layer.load_packed(tensors)


def test_an_empty_part_of_the_library_path_is_not_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("NF4LINEAR_LIBRARY_PATH", f"{tmp_path}:")
    assert native.library_folders() == [tmp_path]


# ---- patch_model -----------------------------------------------------------------------------------------------------


def test_layers_that_only_look_like_linear_ones_stay():
    class Conv1D(nn.Conv1d):
        pass

    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 0), Conv1D(4, 4, 3))
    patch(model)
    assert packed_names(model) == ["0"]
    assert nf4linear.report(model).skipped == {"1": "its weight is empty"}


def test_adapters_are_not_quantized():
    model = auto_class("llama").from_config(tiny_config("llama"))
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj"], init_lora_weights=False)
    adapted = patch(peft.get_peft_model(model, config))
    names = packed_names(adapted)
    assert not [name for name in names if "lora_" in name or "modules_to_save." in name]
    assert len([name for name in names if name.endswith("q_proj.base_layer")]) == 2


@pytest.mark.parametrize("kind", ["transformers", "torch"])
def test_a_run_cut_short_can_be_finished(monkeypatch, kind):
    torch.manual_seed(0)
    if kind == "torch":
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(7)))
    else:
        model = auto_class("llama").from_config(tiny_config("llama"))
    original, calls = PackedLinear.from_linear, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(PackedLinear, "from_linear", interrupted)
    bytes_before = nf4linear.patch_report.weight_bytes(model)
    with pytest.raises(KeyboardInterrupt):
        patch(model, skip=["down_proj"] if kind == "transformers" else ())
    assert len(packed_names(model)) == 4
    monkeypatch.undo()
    patch(model)
    assert len(packed_names(model)) == (12 if kind == "transformers" else 7)
    if kind == "transformers":
        report = nf4linear.report(model)
        assert len(report.replaced) == 12 and report.bytes_before == bytes_before
        patch(model)
        assert nf4linear.report(model) is report


def test_a_head_whose_config_cannot_untie_it_is_refused():
    model = auto_class("t5").from_config(tiny_config("t5"))
    with pytest.raises(ValueError, match="lm_head: T5Config always ties it"):
        patch(model, lm_head="w8")
    assert not packed_names(model)


def test_variants_are_loaded_and_checked(tmp_path):
    model = patch(auto_class("llama").from_config(tiny_config("llama")))
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size="40KB")
    loaded = auto_class("llama").from_pretrained(tmp_path, variant="fp16")
    assert torch.equal(logits(loaded), logits(model))

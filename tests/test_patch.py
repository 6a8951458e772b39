"""patch_model, unpatch_model and patched_loading on tiny models of several architectures."""

from __future__ import annotations

import copy
import pickle
import types
import warnings

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

import nf4linear
from nf4linear import NF4Linear, PackedLinear, W8Linear, patch_model
from nf4linear.select import name_matches
from tiny_models import ARCHITECTURES, auto_class, bnb_config, logits

pytestmark = pytest.mark.filterwarnings("ignore:.*fused expert weights")


def packed_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def load(folder, architecture="llama", **options) -> nn.Module:
    return auto_class(architecture).from_pretrained(folder, **options)


def dequantized(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model whose bitsandbytes layers are plain ones with bitsandbytes' own dequantized float32 weights."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, bnb.nn.Linear4bit):
            layer.weight.quant_state.dtype = torch.float32
            weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            weight = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        else:
            continue
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(weight.to(dtype)), layer.bias
        model.set_submodule(name, plain)
    return model


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_bitsandbytes_model_keeps_its_layers_and_values(tiny_bnb, architecture, bits):
    model = load(tiny_bnb(architecture, bits), architecture)
    kind = bnb.nn.Linear4bit if bits == 4 else bnb.nn.Linear8bitLt
    names = {name for name, module in model.named_modules() if isinstance(module, kind)}
    oracle = nn.Module.float(dequantized(model, torch.float32))
    assert patch_model(model, progress=False) is model
    assert packed_names(model) == names and names
    assert all(isinstance(model.get_submodule(name), NF4Linear if bits == 4 else W8Linear) for name in names)
    # transformers loads this checkpoint in bfloat16 whatever dtype is asked for; the packed layers do not mind a cast.
    got, want = logits(nn.Module.float(model), architecture), logits(oracle, architecture)
    # bitsandbytes dequantizes blocks that straddle rows wrongly on a CPU.
    if bits == 8 or architecture != "llama-odd":
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert got.isfinite().all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_plain_model_gets_the_layers_that_bitsandbytes_would_quantize(tiny, tiny_bnb, architecture):
    plain = load(tiny(architecture), architecture)
    reference = patch_model(load(tiny_bnb(architecture), architecture), progress=False)
    patch_model(plain, progress=False)
    assert packed_names(plain) == packed_names(reference)
    for name in packed_names(plain):
        assert torch.equal(plain.get_submodule(name).qweight, reference.get_submodule(name).qweight)
    close = (logits(plain, architecture) - logits(reference, architecture)).abs().max()
    assert close <= 1e-2 * logits(reference, architecture).abs().max()


@pytest.mark.parametrize("bits", [4, 8])
def test_unpatch_gives_the_bitsandbytes_model_back(tiny_bnb, bits):
    model = load(tiny_bnb(bits=bits))
    untouched = load(tiny_bnb(bits=bits))
    quantizer, config = model.hf_quantizer, model.config.quantization_config
    nf4linear.unpatch_model(patch_model(model, progress=False))
    assert not packed_names(model)
    assert model.hf_quantizer is quantizer and model.config.quantization_config is config
    assert getattr(model, f"is_loaded_in_{bits}bit") and model.quantization_method == "bitsandbytes"
    want, got = untouched.state_dict(), model.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)
    assert torch.equal(logits(model), logits(untouched))
    with pytest.raises(ValueError, match="not patched"):
        nf4linear.report(model)


def test_unpatch_of_a_model_that_was_plain_can_be_saved_for_bitsandbytes(tiny, tmp_path):
    model = nf4linear.unpatch_model(patch_model(load(tiny()), progress=False))
    want = logits(copy.deepcopy(model))
    assert model.config.quantization_config.load_in_4bit
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), want)


def test_nothing_of_bitsandbytes_is_left_on_the_model(tiny_bnb):
    model = patch_model(load(tiny_bnb()), progress=False)
    assert model.hf_quantizer.quantization_config.quant_method == "nf4linear" == model.quantization_method
    assert model.config.quantization_config is model.hf_quantizer.quantization_config
    assert not getattr(model, "is_loaded_in_4bit", False) and model.is_quantized
    operations = [op for conversion in model._weight_conversions for op in getattr(conversion, "operations", ())]
    assert not any(hasattr(operation, "hf_quantizer") for operation in operations)
    assert not any("bitsandbytes" in type(p).__module__ for p in model.parameters())
    model.to("cpu")  # transformers guards bitsandbytes models against moves


def test_patching_twice_changes_nothing(tiny_bnb):
    model = patch_model(load(tiny_bnb()), progress=False)
    layers = {name: model.get_submodule(name) for name in packed_names(model)}
    report = nf4linear.report(model)
    patch_model(model, progress=False)
    assert all(model.get_submodule(name) is layer for name, layer in layers.items())
    assert nf4linear.report(model) is report


def test_layers_left_out_of_a_packed_checkpoint_stay_out(tiny, tmp_path):
    patch_model(load(tiny()), skip=["q_proj"], progress=False).save_pretrained(tmp_path)
    with nf4linear.patched_loading(progress=False):
        model = load(tmp_path)
    assert not any("q_proj" in name for name in packed_names(model)) and len(packed_names(model)) == 12
    patch_model(model, lm_head="w8", progress=False)
    assert isinstance(model.lm_head, W8Linear) and len(packed_names(model)) == 13


def test_a_model_of_another_quantizer_is_refused(tiny):
    model = load(tiny())
    model.hf_quantizer = types.SimpleNamespace(quantization_config=types.SimpleNamespace(quant_method="gptq"))
    with pytest.raises(ValueError, match="gptq"):
        patch_model(model, progress=False)
    assert not packed_names(model)


def test_copies_and_pickles_of_a_patched_model(tiny_bnb):
    model = patch_model(load(tiny_bnb()), progress=False)
    want = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), want) and other.num_parameters() == model.num_parameters()


# ---- what is left alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "entry", "matches"),
    [
        ("model.layers.0.self_attn.q_proj", "q_proj", True),
        ("model.layers.0.self_attn.q_proj", "self_attn.q_proj", True),
        ("model.layers.0.self_attn.q_proj", "model.layers.0", True),
        ("model.layers.0.self_attn.q_proj", "*.q_proj", True),
        ("model.layers.0.self_attn.q_proj", "proj", False),
        ("model.layers.10.mlp", "layers.1", False),
        ("lm_head", "lm_head", True),
    ],
)
def test_skip_entries_match_whole_parts(name, entry, matches):
    assert name_matches(name, entry) is matches


def test_a_skip_list_adds_to_what_stays_anyway(tiny):
    model = patch_model(load(tiny()), skip=["q_proj", "layers.1.mlp"], progress=False)
    assert type(model.lm_head) is nn.Linear
    names = packed_names(model)
    assert names and not any("q_proj" in name or "layers.1.mlp" in name for name in names)
    skipped = nf4linear.report(model).skipped
    assert "output embedding" in skipped["lm_head"] and "q_proj" in skipped["model.layers.0.self_attn.q_proj"]


def test_a_skip_entry_that_matches_nothing_is_said():
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.warns(UserWarning, match="q_porj"):
        patch_model(model, skip=["q_porj"], progress=False)


def test_tied_head_and_embedding_stay_one_tensor(tiny, tmp_path):
    model = patch_model(load(tiny("llama-tied")), progress=False)
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
@pytest.mark.parametrize("source", ["plain", "bnb"])
def test_the_head_is_quantized_on_request_and_untied(tiny, tiny_bnb, tmp_path, architecture, source):
    model = load(tiny(architecture) if source == "plain" else tiny_bnb(architecture))
    embedding = model.model.embed_tokens.weight.clone()
    patch_model(model, lm_head="w8", progress=False)
    assert isinstance(model.lm_head, W8Linear) and torch.equal(model.model.embed_tokens.weight, embedding)
    assert any("tied" in note for note in nf4linear.report(model).notes) == (architecture == "llama-tied")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert isinstance(again.lm_head, W8Linear) and torch.equal(logits(again), logits(model))


def test_layers_whose_owner_reads_their_weight_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
            self.proj = nn.Linear(64, 64)

        def forward(self, x):
            return self.proj(self.encoder(self.attention(x, x, x)[0]))

    model = Model().eval()
    x = torch.randn(2, 5, 64)
    before = model.attention(x, x, x)[0], model.encoder(x)
    patch_model(model, progress=False)
    assert packed_names(model) == {"proj"}
    assert torch.equal(model.attention(x, x, x)[0], before[0]) and torch.equal(model.encoder(x), before[1])
    reasons = nf4linear.report(model).skipped
    assert "MultiheadAttention" in reasons["attention.out_proj"]
    assert "TransformerEncoderLayer" in reasons["encoder.linear1"]
    assert model(x).shape == x.shape


def test_layers_kept_in_float32_by_the_model_stay(tiny):
    model = patch_model(load(tiny("t5"), "t5"), progress=False)
    kept = {name for name, module in model.named_modules() if name.endswith(".wo") and type(module) is nn.Linear}
    assert kept and all("float32" in nf4linear.report(model).skipped[name] for name in kept)


def test_unusual_linears_stay_and_are_named():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Special(64, 64), nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    model.append(nn.Linear(64, 64).double())
    patch_model(model, progress=False)
    assert packed_names(model) == {"0"}
    assert set(nf4linear.report(model).skipped) == {"1", "2", "3"}


def test_one_layer_in_two_places_stays_one_layer():
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    patch_model(model, progress=False)
    assert isinstance(model["a"], NF4Linear) and model["a"] is model["b"][0]


def test_bnb_8bit_layers_with_16bit_weights_stay():
    model = nn.Sequential(bnb.nn.Linear8bitLt(64, 48), nn.Linear(48, 48))
    patch_model(model, progress=False)
    assert type(model[0]) is bnb.nn.Linear8bitLt and isinstance(model[1], NF4Linear)
    assert "has_fp16_weights" in nf4linear.report(model).skipped["0"]


# ---- never half done ---------------------------------------------------------------------------------------


def test_a_bad_layer_is_found_before_anything_is_replaced(tiny, tiny_bnb):
    plain = load(tiny())
    with torch.no_grad():
        plain.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    quantized = load(tiny_bnb())
    state = quantized.model.layers[1].mlp.down_proj.weight.quant_state
    state.absmax = state.absmax[:-1]
    offloaded = load(tiny())
    offloaded.model.layers[1].mlp.down_proj.to("meta")
    for model in (plain, quantized, offloaded):
        config = getattr(model.config, "quantization_config", None)
        with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj"):
            patch_model(model, progress=False)
        assert not packed_names(model) and getattr(model.config, "quantization_config", None) is config


def test_a_failure_on_the_way_puts_bitsandbytes_layers_back(tiny_bnb, monkeypatch):
    model, untouched = load(tiny_bnb()), load(tiny_bnb())
    original, calls = nf4linear.PackedLinear.from_bnb, []

    def fail_at_the_fifth(*args, **options):
        calls.append(args)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no memory")
        return original(*args, **options)

    monkeypatch.setattr(nf4linear.PackedLinear, "from_bnb", fail_at_the_fifth)
    with pytest.raises(torch.OutOfMemoryError):
        patch_model(model, progress=False)
    assert not packed_names(model)
    want, got = untouched.state_dict(), model.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)
    assert model.quantization_method == "bitsandbytes"


@pytest.mark.parametrize(
    "options", [{"format": "int3"}, {"blocksize": 48}, {"lm_head": "int3"}, {"format": "w8_u8"}, {"skip": 3}]
)
def test_impossible_options_are_refused_first(options):
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises((ValueError, TypeError)):
        patch_model(model, progress=False, **options)
    assert type(model[0]) is nn.Linear


def test_a_single_layer_is_no_model():
    with pytest.raises(ValueError, match="from_linear"):
        patch_model(nn.Linear(64, 64), progress=False)
    with pytest.warns(UserWarning, match="no layer to replace"):
        patch_model(nn.Sequential(nn.ReLU()), progress=False)


def test_layers_that_accelerate_keeps_elsewhere_are_refused(tiny_bnb):
    import accelerate

    model = accelerate.cpu_offload(load(tiny_bnb("gpt2"), "gpt2"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"transformer\.h\.0.*offload"):
        patch_model(model, progress=False)
    assert not packed_names(model) and model.quantization_method == "bitsandbytes"


# ---- what hangs on a layer ---------------------------------------------------------------------------------


def test_mode_hooks_and_bias_are_kept(tiny_bnb):
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 48)).train()
    model[0].bias.requires_grad_(False)
    seen = []
    handle = model[0].register_forward_hook(lambda m, args, out: seen.append(type(m)))
    model[1].register_forward_pre_hook(lambda m, args, kwargs: seen.append("pre"), with_kwargs=True)
    bias = model[0].bias
    patch_model(model, progress=False)
    model(torch.randn(2, 64))
    assert seen == [NF4Linear, "pre"] and model[0].training and model[0].bias is bias and not bias.requires_grad
    handle.remove()
    model(torch.randn(2, 64))
    assert seen == [NF4Linear, "pre", "pre"]


def test_accelerate_hooks_move_to_the_new_layer(tiny_bnb):
    import accelerate

    model = load(tiny_bnb())
    hooked = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True, main_device="cpu")
    before = {name for name, module in hooked.named_modules() if hasattr(module, "_hf_hook")}
    want = logits(patch_model(load(tiny_bnb()), progress=False))
    patch_model(hooked, progress=False)
    after = {name for name, module in hooked.named_modules() if hasattr(module, "_hf_hook")}
    assert before == after and before & packed_names(hooked)
    assert torch.equal(logits(hooked), want)


# ---- report ------------------------------------------------------------------------------------------------


def test_report_counts_and_prints(tiny, tiny_bnb):
    dense = load(tiny())
    for model in (patch_model(load(tiny()), progress=False), patch_model(load(tiny_bnb()), progress=False)):
        report = nf4linear.report(model)
        assert set(report.replaced) == packed_names(model) and set(report.replaced.values()) == {"nf4"}
        assert report.parameters == dense.num_parameters() == model.num_parameters()
        assert report.bytes_after == sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
        text = str(report)
        assert "14 layers replaced" in text and "lm_head" in text and "output embedding" in text


@pytest.mark.filterwarnings("error:.*fused expert weights")
@pytest.mark.parametrize("options", [{"double_quant": False}, {"format": "fp4", "double_quant": False}])
def test_scales_in_three_dimensions_are_no_experts(tiny, options):
    model = patch_model(load(tiny()), progress=False, **options)
    scales = [layer.absmax for layer in model.modules() if isinstance(layer, NF4Linear)]
    assert any(scale.dim() == 3 for scale in scales)
    assert nf4linear.report(model).expert_bytes == 0


def test_fused_experts_are_counted_and_said(tiny):
    model = load(tiny("mixtral"))
    expected = sum(
        p.numel() * p.element_size() for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3
    )
    with pytest.warns(UserWarning, match="expert"):
        patch_model(model, progress=False)
    assert nf4linear.report(model).expert_bytes == expected > 0
    assert "fused expert weights" in str(nf4linear.report(model))


def test_progress_can_be_shown(tiny_bnb, capsys):
    patch_model(load(tiny_bnb()), progress=True)
    assert capsys.readouterr().out == ""


# ---- patched_loading ---------------------------------------------------------------------------------------


def test_patched_loading(tiny, tiny_bnb):
    want = logits(patch_model(load(tiny_bnb()), progress=False))
    with nf4linear.patched_loading(progress=False):
        first = load(tiny_bnb())
        second, info = auto_class("llama").from_pretrained(
            tiny(), quantization_config=bnb_config(), output_loading_info=True
        )
        plain = load(tiny())
    assert torch.equal(logits(first), want) and packed_names(second) == packed_names(first) == packed_names(plain)
    assert "missing_keys" in info
    assert not packed_names(load(tiny_bnb()))
    with pytest.raises(RuntimeError, match="inside"), nf4linear.patched_loading(progress=False):
        raise RuntimeError("inside")
    assert not packed_names(load(tiny_bnb()))
    with pytest.raises(TypeError, match="formt"), nf4linear.patched_loading(formt="nf4"):
        pass


def test_generate_gives_the_same_tokens_as_the_dequantized_model(tiny_bnb):
    model = load(tiny_bnb("gpt2"), "gpt2")
    oracle = dequantized(model)
    patch_model(model, progress=False)
    ids = torch.arange(3, 12).view(1, 9)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(model.generate(ids, **kwargs), oracle.generate(ids, **kwargs))

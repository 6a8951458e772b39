"""The transformers quantizer: packed checkpoints in and out, device maps, quantizing while loading, registration."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CompileConfig

import nf4linear
from nf4linear import NF4Linear, NF4LinearConfig, PackedLinear, W8Linear
from tiny_models import ARCHITECTURES, auto_class, logits

pytestmark = pytest.mark.filterwarnings("ignore:.*fused expert weights")


def load(folder, architecture="llama", **options) -> nn.Module:
    return auto_class(architecture).from_pretrained(folder, **options)


def packed(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_load_save_load_save_is_stable_byte_for_byte(tiny_bnb, tiny_packed, tmp_path, architecture, bits):
    patched = nf4linear.patch_model(load(tiny_bnb(architecture, bits), architecture), progress=False)
    first = load(tiny_packed(architecture, bits), architecture)
    assert packed(first).keys() == packed(patched).keys()
    assert torch.equal(logits(first, architecture), logits(patched, architecture))
    first.save_pretrained(tmp_path / "a")
    load(tmp_path / "a", architecture).save_pretrained(tmp_path / "b")
    assert files_of(tiny_packed(architecture, bits)) == files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_what_a_checkpoint_holds(tiny_packed):
    config = json.loads((tiny_packed() / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "nf4linear" and config["format_version"] == 1
    assert config["modules"] == {"default": {"format": "nf4", "blocksize": 64, "double_quant": True}}
    assert config["modules_to_not_convert"] == ["lm_head"] and isinstance(config["plugin_version"], str)
    with safe_open(tiny_packed() / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "nf4linear_format_version": "1"}
        keys = set(file.keys())
    layer = "model.layers.0.mlp.up_proj"
    assert {k for k in keys if k.startswith(layer)} == {f"{layer}.{name}" for name in
        ("qweight", "absmax_q", "code", "nested_absmax", "nested_code", "nested_offset")}  # fmt: skip


def test_loaded_layers_are_frozen_named_and_know_their_dtype(tiny_packed):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = load(tiny_packed(), dtype=dtype)
        assert model.dtype == dtype
        for name, layer in packed(model).items():
            assert layer.layer_name == name and layer.compute_dtype == layer.weight.dtype == dtype
            assert not any(p.requires_grad for p in layer.packed().values())
            assert {p.dtype for p in layer.packed().values()} == {torch.uint8, torch.float32}
        assert logits(model).dtype == dtype
    torch.set_default_dtype(torch.bfloat16)
    try:
        other = load(tiny_packed())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(logits(other), logits(load(tiny_packed())))


def test_shards_may_be_cut_anywhere(tiny_packed, tmp_path):
    model = load(tiny_packed())
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_base_model_loads_from_a_checkpoint_with_a_head(tiny_packed):
    from transformers import AutoModel

    whole, base = load(tiny_packed()), AutoModel.from_pretrained(tiny_packed())
    assert len(packed(base)) == len(packed(whole))
    ids = torch.arange(3, 12).view(1, 9)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, whole.model(ids).last_hidden_state)


def test_mixed_formats(tiny, tmp_path):
    model = load(tiny())
    for name, format in (("q_proj", "w8_s8"), ("k_proj", "fp4")):
        layer = getattr(model.model.layers[0].self_attn, name)
        setattr(model.model.layers[0].self_attn, name, PackedLinear.from_linear(layer, format=format))
    nf4linear.patch_model(model, skip=["v_proj"], progress=False)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    got, want = ({name: layer.spec for name, layer in packed(m).items()} for m in (again, model))
    assert got == want and {spec.format for spec in got.values()} == {"nf4", "fp4", "w8_s8"}
    assert torch.equal(logits(again), logits(model))


# ---- device maps ---------------------------------------------------------------------------------------------


DEVICE_MAP = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_of_a_packed_checkpoint_can_live_on_disk(tiny_packed, tmp_path, bits):
    model = load(tiny_packed(bits=bits), device_map=DEVICE_MAP, offload_folder=tmp_path)
    offloaded = model.model.layers[1].mlp.up_proj
    assert isinstance(offloaded, PackedLinear) and offloaded.qweight.is_meta
    assert torch.equal(logits(model), logits(load(tiny_packed(bits=bits))))
    for refused in (lambda: nf4linear.unpatch_model(model), model.dequantize):
        with pytest.raises(ValueError, match=r"model\.layers\.1.*offloaded"):
            refused()


def test_device_map_cpu_and_auto(tiny_packed):
    want = logits(load(tiny_packed()))
    for device_map in ("cpu", {"": "cpu"}, "auto"):
        assert torch.allclose(logits(load(tiny_packed(), device_map=device_map)).cpu(), want, atol=1e-2)


def test_a_plain_checkpoint_is_not_quantized_onto_a_disk(tiny, tmp_path):
    with pytest.raises(ValueError, match="nf4linear pack"):
        load(tiny(), quantization_config=NF4LinearConfig(), device_map=DEVICE_MAP, offload_folder=tmp_path)


def test_sizes_for_the_automatic_device_map(tiny, tiny_packed):
    from transformers.integrations.accelerate import compute_module_sizes

    config = load(tiny_packed()).config
    quantization = config.quantization_config.to_dict()
    true_bytes = sum(tensor.nbytes for tensor in load_file(tiny_packed() / "model.safetensors").values())
    from nf4linear.hf import NF4LinearQuantizer

    for pre_quantized, tolerance in ((True, 0.0), (False, 0.25)):  # the tables weigh much in a tiny layer
        with torch.device("meta"):
            model = auto_class("llama").from_config(config).bfloat16()
        quantizer = NF4LinearQuantizer(NF4LinearConfig(**quantization), pre_quantized=pre_quantized)
        quantizer._process_model_before_weight_loading(model, dtype=torch.bfloat16)
        sizes, _ = compute_module_sizes(model, quantizer)
        assert abs(sizes[""] - true_bytes) <= tolerance * true_bytes + 2048  # buffers
    assert quantizer.quantized_element_size == pytest.approx(0.5 + (1 + 4 / 256) / 64, rel=1e-3)


# ---- quantizing while loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_plain_checkpoint_is_quantized_while_it_loads(tiny, tmp_path, architecture):
    patched = nf4linear.patch_model(load(tiny(architecture), architecture), progress=False)
    model, info = auto_class(architecture).from_pretrained(
        tiny(architecture), quantization_config=NF4LinearConfig(), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert packed(model).keys() == packed(patched).keys()
    assert torch.equal(logits(model, architecture), logits(patched, architecture))
    model.save_pretrained(tmp_path / "a")
    patched.save_pretrained(tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_options_of_quantizing_while_loading(tiny):
    config = NF4LinearConfig(
        modules={"default": {"format": "fp4", "blocksize": 32, "double_quant": False}, "*.q_proj": {"format": "w8_s8"}},
        modules_to_not_convert=["k_proj"],
    )
    model = load(tiny(), quantization_config=config)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, W8Linear) and type(attention.k_proj) is nn.Linear
    assert attention.v_proj.spec.format == "fp4" and attention.v_proj.spec.blocksize == 32
    assert type(model.lm_head) is nn.Linear
    assert isinstance(
        load(tiny(), quantization_config=NF4LinearConfig(format="w8_s8")).model.layers[0].mlp.up_proj, W8Linear
    )


# ---- what must be refused --------------------------------------------------------------------------------------


def edit_config(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


@pytest.fixture
def damaged(tiny_packed, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_packed(), tmp_path / "damaged"))


KEY = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{KEY}.nested_absmax"), ["nested_absmax", KEY]),
        (lambda t: t.pop(f"{KEY}.qweight"), ["qweight", KEY]),
        (lambda t: t.update({f"{KEY}.absmax_q": t[f"{KEY}.absmax_q"].float()}), ["absmax_q", KEY]),
        (lambda t: t.update({f"{KEY}.qweight": t[f"{KEY}.qweight"][:2].clone()}), ["qweight", KEY]),
        (lambda t: t.update({f"{KEY}.absmax": torch.zeros(8, 1, 16)}), ["absmax", KEY]),
        (lambda t: t.update({f"{KEY}.nested_offset": torch.tensor(float("nan"))}), ["nested_offset", KEY]),
        (lambda t: t.update({f"{KEY}.code": t[f"{KEY}.code"].flip(0)}), ["code", KEY]),
    ],
)
def test_damaged_weights_are_refused_by_name(damaged, change, words):
    edit_tensors(damaged, change)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        load(damaged)
    assert all(word in str(caught.value) for word in [str(damaged), *words]), caught.value


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: c.update(format_version=99), "format_version is 99"),
        (lambda c: c.pop("format_version"), "format_version"),
        (lambda c: c.update(modules=None), "modules must map names"),
        (lambda c: c.update(modules={"default": {"format": "nf3"}}), "modules['default']: unknown weight format 'nf3'"),
        (lambda c: c.update(modules={"default": {"format": "nf4", "blocksize": 48}}), "modules['default']: blocksize"),
        (lambda c: c["modules"].update({KEY: {"format": "nf4", "blocksize": 48}}), f"modules['{KEY}']: blocksize"),
        (lambda c: c.update(modules={"default": {"format": "nf4", "blocksize": 128}}), "model.layers"),
        (lambda c: c.update(modules={"default": {"format": "w8_s8"}}), "model.layers"),
        (lambda c: c.update(modules_to_not_convert="lm_head"), "modules_to_not_convert"),
        (lambda c: c.update(modules_to_not_convert=[]), "lm_head"),
    ],
)
def test_configs_that_do_not_fit_are_refused(damaged, change, word):
    edit_config(damaged, change)
    with pytest.raises(ValueError, match=re.escape(word)) as caught:
        load(damaged)
    assert str(damaged) in str(caught.value)


def test_bad_modules_of_a_plain_model_are_refused_before_it_loads(tiny):
    config = NF4LinearConfig(modules={"default": {"format": "nf4", "blocksize": 48}})
    with pytest.raises(ValueError, match=r"quantization_config: modules\['default'\]: blocksize must be one of"):
        load(tiny(), quantization_config=config)


def test_rules_that_leave_a_layer_of_a_plain_model_without_a_format_are_refused(tiny):
    config = NF4LinearConfig(modules={"*.q_proj": {"format": "nf4"}})
    with pytest.raises(ValueError, match=r"no format for 'model\.layers\.0\.mlp\.down_proj' and no default"):
        load(tiny(), quantization_config=config)


def test_a_skipped_name_that_no_module_has_is_told(tiny):
    with pytest.warns(UserWarning, match="'q_porj' matches no module"):
        load(tiny(), quantization_config=NF4LinearConfig(modules_to_not_convert=["q_porj"]))


def test_a_layer_in_two_places_of_a_model_is_replaced_in_both():
    """By a quantizer before loading, and by its way back to a plain model."""
    from nf4linear.hf import NF4LinearQuantizer

    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.Sequential(shared))
    model.config = None
    quantizer = NF4LinearQuantizer(NF4LinearConfig(), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    assert isinstance(model[0], PackedLinear) and model[1][0] is model[0]
    model[0] = model[1][0] = NF4Linear(64, 64)
    quantizer._dequantize(model)
    assert type(model[0]) is nn.Linear and model[1][0] is model[0]


def test_tensor_parallelism_is_refused_with_advice(tiny_packed):
    from transformers.distributed import DistributedConfig

    from nf4linear.hf import NF4LinearQuantizer

    model = load(tiny_packed())
    model.config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(NotImplementedError, match="device_map"):
        NF4LinearQuantizer(NF4LinearConfig())._process_model_before_weight_loading(model)


def test_an_old_transformers_is_told_so(monkeypatch):
    from nf4linear import hf

    monkeypatch.setattr(hf.transformers, "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"5\.17.*4\.57\.6"):
        hf.NF4LinearQuantizer(NF4LinearConfig()).validate_environment()
    monkeypatch.setattr(hf.transformers, "__version__", "5.17.0.dev0")
    hf.NF4LinearQuantizer(NF4LinearConfig()).validate_environment()


def test_a_model_that_still_holds_bitsandbytes_layers_is_not_saved(tiny_bnb, tmp_path):
    model = nf4linear.patch_model(load(tiny_bnb()), skip=["q_proj"], progress=False)
    with pytest.raises(ValueError, match=r"q_proj.*bitsandbytes"):
        model.save_pretrained(tmp_path)


# ---- the rest of the quantizer's duties ----------------------------------------------------------------------------


def test_config_is_json_and_takes_what_it_does_not_know():
    config = NF4LinearConfig(format="fp4", blocksize=128, future_option=3)
    text = json.dumps(config.to_dict())
    assert NF4LinearConfig.from_dict(json.loads(text)).to_dict() == config.to_dict()
    assert "fp4" in repr(config) and config.to_json_string()
    with pytest.raises(ValueError, match="blocksize"):
        NF4LinearConfig(blocksize=48)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_dequantize_makes_a_plain_model(tiny_packed, tmp_path, architecture):
    model = load(tiny_packed(architecture), architecture)
    want = logits(model, architecture)
    model.save_pretrained(tmp_path / "before")  # leaves the dtype as text in the config
    plain = model.dequantize()
    assert not packed(plain) and not hasattr(plain.config, "quantization_config")
    error = (logits(plain, architecture) - want).abs().max()
    assert error <= 2e-2 * want.abs().max()
    plain.save_pretrained(tmp_path / "after")
    assert torch.equal(logits(load(tmp_path / "after", architecture), architecture), logits(plain, architecture))


def test_unpatch_of_a_packed_checkpoint_gives_the_bitsandbytes_one(tiny_packed, tiny_bnb, tmp_path):
    model = nf4linear.unpatch_model(load(tiny_packed()))
    want, got = load(tiny_bnb()).state_dict(), model.state_dict()
    assert want.keys() == got.keys()
    for key in want:
        if "quant_state" not in key:  # the text of it names the dtype before quantization, which is not kept
            assert torch.equal(want[key], got[key]), key
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(load(tiny_bnb())))


def test_parameter_count_and_footprint(tiny, tiny_packed):
    dense, model = load(tiny()), load(tiny_packed())
    assert model.num_parameters() == dense.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == dense.num_parameters(exclude_embeddings=True)
    assert dense.num_parameters(only_trainable=True) > model.num_parameters(only_trainable=True) > 0
    file_bytes = sum(t.nbytes for t in load_file(tiny_packed() / "model.safetensors").values())
    assert abs(model.get_memory_footprint(return_buffers=False) - file_bytes) <= 0.02 * file_bytes


def test_source_file_travels_with_saves(tiny_packed, tmp_path):
    source = Path(shutil.copytree(tiny_packed(), tmp_path / "source"))
    model = load(source)
    model.save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none" / "nf4linear_source.json").exists()
    record = {"format_version": 1, "source_format": "bitsandbytes", "quantization_config": None, "index": None,
              "files": [], "layers": {}}  # fmt: skip
    (source / "nf4linear_source.json").write_text(json.dumps(record))
    model = load(source)
    model.save_pretrained(tmp_path / "copy")
    model.save_pretrained(source)
    assert json.loads((tmp_path / "copy" / "nf4linear_source.json").read_text()) == record
    (source / "nf4linear_source.json").unlink()
    with pytest.warns(UserWarning, match="is gone"):
        model.save_pretrained(tmp_path / "late")


def test_loading_does_not_read_what_only_unpack_needs(damaged):
    (damaged / "nf4linear_source.json").write_text("{")
    assert packed(load(damaged))


def test_flags(tiny_packed):
    quantizer = load(tiny_packed()).hf_quantizer
    assert quantizer.is_compileable and quantizer.is_trainable and quantizer.is_serializable()


def test_static_cache_generation_gives_the_same_tokens(tiny_packed):
    model = load(tiny_packed(), dtype=torch.float32)
    ids = torch.arange(3, 12).view(1, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    want = model.generate(ids, **options)
    model.generation_config.disable_compile = True
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), want)


def test_the_whole_model_compiles_without_a_break(tiny_packed):
    model = load(tiny_packed(), dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.arange(3, 21).view(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_generation_compiles_its_decode_step_once(tiny_packed):
    """As transformers compiles it on a GPU, but for the backend: one graph for all steps and calls, the same tokens."""
    model = load(tiny_packed(), dtype=torch.float32)
    ids = torch.arange(3, 12).view(1, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    want = model.generate(ids, **options)
    torch._dynamo.reset()
    graphs = []
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    compiled = CompileConfig(fullgraph=True, backend=backend, mode="default")
    compiled._compile_all_devices = True
    for _ in range(2):
        got = model.generate(ids, cache_implementation="static", compile_config=compiled, **options)
        assert torch.equal(got, want)
    assert len(graphs) == 1


# ---- registration ------------------------------------------------------------------------------------------------


def run_python(code: str, *arguments: str) -> str:
    # "-c" puts the working folder first on the path: it must be the one that this process imports from.
    home = Path(nf4linear.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=home, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


LOAD = """
import sys, torch
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model.model.layers[0].mlp.up_proj).__name__ == "NF4Linear"
with torch.no_grad():
    print(model(torch.arange(3, 21).view(2, 9)).logits.float().sum().item())
assert "bitsandbytes" not in sys.modules
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import nf4linear\nfrom transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM\nimport nf4linear",
        "from nf4linear import NF4LinearConfig, patch_model\nfrom transformers import AutoModelForCausalLM",
        "import nf4linear\nimport transformers.quantizers.auto\nfrom transformers import AutoModelForCausalLM",
    ],
)
def test_a_new_process_loads_it_in_any_order_of_imports(tiny_packed, imports):
    printed = run_python(imports + LOAD, str(tiny_packed()))
    assert float(printed) == pytest.approx(logits(load(tiny_packed())).float().sum().item(), abs=1e-3)


def test_importing_is_cheap_and_silent():
    code = """
import sys
import nf4linear
loaded = {"torch", "transformers", "bitsandbytes", "safetensors", "rich"} & set(sys.modules)
assert not loaded, loaded
assert set(nf4linear.__all__) <= set(dir(nf4linear)) and nf4linear.__version__
for name in nf4linear.__all__:
    assert getattr(nf4linear, name).__name__ == name
"""
    assert run_python(code) == ""


def test_registering_twice_is_harmless():
    from nf4linear.hf import register
    from nf4linear.registration import register_with_transformers

    register()
    register_with_transformers()
    assert isinstance(NF4Linear(64, 16), nn.Linear)


def test_without_the_import_nothing_loads_silently(tiny_packed):
    code = """
import sys, torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert "model.layers.0.mlp.up_proj.weight" in info["missing_keys"], info
assert all(p.is_floating_point() for p in model.parameters())
"""
    run_python(code, str(tiny_packed()))

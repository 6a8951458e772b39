"""Packed layers and patched models on a GPU: moves, bitsandbytes' own GPU quantization, offloading, memory."""

import copy

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

import nf4linear
from nf4linear import NF4Linear, NF4LinearConfig, PackedLinear, W8Linear
from tiny_models import auto_class, bnb_config, logits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def packed(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def same_packed(a: PackedLinear, b: PackedLinear) -> bool:
    left, right = a.packed(), b.packed()
    return all(left[k].dtype == right[k].dtype and torch.equal(left[k].cpu(), right[k].cpu()) for k in left)


def gpu_logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 21, device="cuda").view(2, 9)
    with torch.no_grad():
        return model(input_ids=ids).logits.cpu()


@pytest.mark.parametrize("cls", [NF4Linear, W8Linear])
def test_moves_are_lossless(cls):
    layer = cls.from_linear(nn.Linear(192, 80).bfloat16())
    before = copy.deepcopy(layer)
    x = torch.randn(3, 192, dtype=torch.bfloat16)
    on_gpu = layer.to("cuda")
    y = on_gpu(x.cuda())
    torch.testing.assert_close(y.cpu(), before(x), rtol=2e-2, atol=2e-2)
    assert same_packed(on_gpu, before) and on_gpu.weight.is_cuda
    again = on_gpu.cpu().cuda()
    assert same_packed(again, before) and torch.equal(again(x.cuda()), y)
    half = again.to("cuda", torch.float16)
    assert same_packed(half, before) and half.bias.dtype == half.compute_dtype == torch.float16


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", [(256, 512), (48, 100), (7, 33), (1000, 1000)])
def test_layers_quantized_by_bitsandbytes_on_the_gpu(quant_type, double_quant, shape):
    n, k = shape
    source = bnb.nn.Linear4bit(k, n, quant_type=quant_type, compress_statistics=double_quant).bfloat16().to("cuda")
    layer = NF4Linear.from_bnb(source)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        source.weight.quant_state.dtype = dtype
        want = bnb.functional.dequantize_4bit(source.weight.data, source.weight.quant_state)
        assert torch.equal(layer.dequantize(dtype), want)
    source.weight.quant_state.dtype = torch.bfloat16
    before, after = source.state_dict(), layer.to_bnb().state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_8bit_layers_of_bitsandbytes_on_the_gpu():
    source = bnb.nn.Linear8bitLt(512, 256, has_fp16_weights=False).bfloat16().to("cuda")
    layer = W8Linear.from_bnb(source)
    want = bnb.functional.int8_vectorwise_dequant(source.weight.data, source.weight.SCB)
    assert torch.equal(layer.dequantize(torch.float32), want)
    source(torch.randn(2, 512, device="cuda", dtype=torch.bfloat16))
    assert same_packed(W8Linear.from_bnb(source), layer)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_patched_model_computes_what_it_does_on_a_cpu(tiny, tiny_bnb, bits):
    on_gpu = auto_class("llama").from_pretrained(tiny_bnb(bits=bits), device_map={"": 0})
    on_cpu = auto_class("llama").from_pretrained(tiny_bnb(bits=bits), device_map={"": "cpu"})
    for model in (on_gpu, on_cpu):
        nf4linear.patch_model(model, progress=False)
    assert all(same_packed(layer, packed(on_cpu)[name]) for name, layer in packed(on_gpu).items())
    want = logits(on_cpu).float()
    assert (gpu_logits(on_gpu).float() - want).abs().max() <= 3e-2 * want.abs().max()
    assert torch.equal(gpu_logits(on_gpu), gpu_logits(on_gpu.cpu().cuda()))
    on_the_fly = auto_class("llama").from_pretrained(tiny(), quantization_config=bnb_config(bits), device_map={"": 0})
    assert packed(nf4linear.patch_model(on_the_fly, progress=False)).keys() == packed(on_cpu).keys()


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_packed_layers_can_be_offloaded(tiny_packed, tmp_path, place):
    device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": place, "model.norm": 0,
                  "model.rotary_emb": 0, "lm_head": 0}  # fmt: skip
    whole = auto_class("llama").from_pretrained(tiny_packed(), device_map={"": 0})
    model = auto_class("llama").from_pretrained(tiny_packed(), device_map=device_map, offload_folder=tmp_path)
    assert model.model.layers[1].mlp.up_proj.qweight.is_meta
    assert torch.equal(gpu_logits(model), gpu_logits(whole))
    bitsandbytes = pytest.raises(ValueError, match="offloaded")
    with bitsandbytes:
        nf4linear.unpatch_model(model)


def test_quantizing_while_loading_keeps_16bit_weights_from_piling_up(tmp_path):
    import transformers

    config = transformers.LlamaConfig(hidden_size=2048, intermediate_size=4096, num_hidden_layers=4, vocab_size=256,
                                      num_attention_heads=16, num_key_value_heads=16)  # fmt: skip
    with torch.device("cuda"):
        model = auto_class("llama").from_config(config).bfloat16()
    model.save_pretrained(tmp_path)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    del model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    model = auto_class("llama").from_pretrained(tmp_path, quantization_config=NF4LinearConfig(), device_map={"": 0})
    assert len(packed(model)) == 28
    final = torch.cuda.memory_allocated() - base
    peak = torch.cuda.max_memory_allocated() - base
    # Quantizing one layer takes some float32 and int64 temporaries of its size (8 and 16 times the bfloat16 weight).
    assert peak <= 1.3 * final + 16 * largest, (peak, final, largest)


def test_static_cache_generation(tiny_packed):
    model = auto_class("llama").from_pretrained(tiny_packed(), device_map={"": 0}, dtype=torch.float32)
    ids = torch.arange(3, 12, device="cuda").view(1, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", disable_compile=True, **options), want)

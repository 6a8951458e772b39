"""A real language model end to end: SmolLM2-135M-Instruct, quantized by bitsandbytes, packed, loaded, scored.

The oracle is bitsandbytes' dequantized weights in plain layers ("exact" in cli/loading.py), read from the bitsandbytes
checkpoint: no code of this package's formats, packing or kernels is between that file and its logits.

float32 is where the packed model must agree with it. In bfloat16 every layer rounds its output to 8 bits, so that any
other order of summation moves the logits of this model by about 2 %, the oracle's own included: there the packed model
must be as near to the float32 oracle as the bfloat16 oracle is. The torch path, which sums in the oracle's own order,
must agree in bfloat16 too.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from typer.testing import CliRunner

import nf4linear
from demo_model import LAYERS, TEXT, load, logits, relative_error
from nf4linear import native
from nf4linear.cli.loading import LoadError, ModelSource
from nf4linear.cli.main import app
from nf4linear.perplexity import perplexity

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def oracle_logits(demo_folders, demo_tokens):
    return {dtype: logits(load(demo_folders[1], "exact", dtype), demo_tokens) for dtype in ("float32", "bfloat16")}


@pytest.fixture
def torch_path(monkeypatch):
    """Layers compute as on a machine where no native library could be built."""
    monkeypatch.setattr(native, "library", lambda kind: None)


def test_float32_logits_of_the_packed_model_are_the_oracle_s(demo_packed, demo_tokens, oracle_logits):
    model = load(demo_packed, "nf4linear", "float32")
    assert sum(isinstance(module, nf4linear.NF4Linear) for module in model.modules()) == LAYERS
    assert model.dtype == torch.float32
    assert relative_error(logits(model, demo_tokens), oracle_logits["float32"]) <= 1e-5


def test_bfloat16_logits_are_as_near_to_the_float32_oracle_as_the_bfloat16_oracle_is(
    demo_packed, demo_tokens, oracle_logits
):
    ours = relative_error(logits(load(demo_packed, "nf4linear", "bfloat16"), demo_tokens), oracle_logits["float32"])
    theirs = relative_error(oracle_logits["bfloat16"], oracle_logits["float32"])
    assert ours <= 1.3 * theirs


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 5e-3), ("float32", 1e-5)])
def test_logits_of_the_torch_path_are_the_oracle_s(
    demo_packed, demo_tokens, oracle_logits, torch_path, dtype, tolerance
):
    model = load(demo_packed, "nf4linear", dtype)
    assert relative_error(logits(model, demo_tokens), oracle_logits[dtype]) <= tolerance


def test_one_wrong_scale_code_shows_in_the_logits(demo_packed, demo_tokens, oracle_logits):
    model = load(demo_packed, "nf4linear", "float32")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.absmax_q[0, 0, 0] ^= 0x10
    assert relative_error(logits(model, demo_tokens), oracle_logits["float32"]) > 1e-5


def test_patched_bitsandbytes_model_equals_the_packed_one(demo_folders, demo_packed, demo_tokens):
    patched = load(demo_folders[1], "nf4linear", "bfloat16")
    assert torch.equal(logits(patched, demo_tokens), logits(load(demo_packed, "nf4linear", "bfloat16"), demo_tokens))


def score(model, token_ids):
    return perplexity(model, token_ids, window=256, stride=192)


def test_perplexity_is_the_oracle_s_within_a_thousandth(demo_folders, demo_packed, demo_tokens):
    ours = score(load(demo_packed, "nf4linear", "float32"), demo_tokens[:600])
    expected = score(load(demo_folders[1], "exact", "float32"), demo_tokens[:600])
    assert ours.perplexity == pytest.approx(expected.perplexity, rel=1e-3)


def test_bfloat16_perplexity_differs_from_the_oracle_s_by_noise_only(demo_folders, demo_packed, demo_tokens):
    ours = score(load(demo_packed, "nf4linear", "bfloat16"), demo_tokens)
    change, error = ours.relative_to(score(load(demo_folders[1], "exact", "bfloat16"), demo_tokens))
    assert error < 4e-3
    assert abs(change) <= 1e-3 + 3 * error


def test_eight_bit_perplexity_is_within_a_hundredth_of_16_bit(demo_folders, demo_tokens):
    w8 = load(demo_folders[0], "nf4linear", "bfloat16", format="w8_s8")
    assert sum(isinstance(module, nf4linear.W8Linear) for module in w8.modules()) == LAYERS
    ours = score(w8, demo_tokens[:600])
    expected = score(load(demo_folders[0], "16-bit", "bfloat16"), demo_tokens[:600])
    assert ours.perplexity == pytest.approx(expected.perplexity, rel=1e-2)


def test_an_int8_checkpoint_of_bitsandbytes_runs_weight_only(demo_folders, demo_tokens, tmp_path):
    """The same codes and scales; bitsandbytes quantizes the activations too, which costs it perplexity."""
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    theirs = AutoModelForCausalLM.from_pretrained(demo_folders[0], dtype="float32", **options)
    theirs.save_pretrained(tmp_path / "int8")
    nf4linear.pack_checkpoint(tmp_path / "int8", tmp_path / "packed", progress=False)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype="float32")
    assert sum(isinstance(module, nf4linear.W8Linear) for module in ours.modules()) == LAYERS
    tokens = demo_tokens[:513]
    scores = [perplexity(model, tokens, window=512, stride=500).perplexity for model in (ours, theirs)]
    assert scores[0] <= scores[1]


def test_unpacking_gives_the_bitsandbytes_files_back_byte_for_byte(demo_folders, demo_packed, tmp_path):
    nf4linear.unpack_checkpoint(demo_packed, tmp_path / "back", progress=False)
    before = sorted(file.name for file in demo_folders[1].glob("*.safetensors"))
    assert before == sorted(file.name for file in (tmp_path / "back").glob("*.safetensors"))
    for name in before:
        assert (tmp_path / "back" / name).read_bytes() == (demo_folders[1] / name).read_bytes(), name


def test_tensors_mapped_from_a_file_are_aligned_for_the_native_library(demo_packed):
    model = AutoModelForCausalLM.from_pretrained(demo_packed)
    layers = [module for module in model.modules() if isinstance(module, nf4linear.PackedLinear)]
    assert all(tensor.data_ptr() % 16 == 0 for layer in layers for tensor in layer.packed().values())
    assert model.num_parameters() == 134_515_008


NEW_PROCESS = """
import json, sys
import nf4linear
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer("The White Rabbit", return_tensors="pt")
for dtype in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
    assert "bitsandbytes" not in sys.modules
    print(json.dumps(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()))
"""


def test_from_pretrained_in_a_new_process_gives_the_same_tokens(demo_folders, demo_packed):
    # "-c" puts the working folder first on the path: it must be the one that this process imports from.
    home = Path(nf4linear.__file__).parents[1]
    call = [sys.executable, "-c", NEW_PROCESS, demo_packed, "float32", "bfloat16"]
    run = subprocess.run(call, capture_output=True, text=True, cwd=home)
    assert run.returncode == 0, run.stderr
    inputs = AutoTokenizer.from_pretrained(demo_packed)("The White Rabbit", return_tensors="pt")
    variants = [("exact", "float32"), ("nf4linear", "bfloat16")]
    for variant, line in zip(variants, run.stdout.splitlines(), strict=True):
        expected = load(demo_folders[1], *variant).generate(**inputs, max_new_tokens=12, do_sample=False)
        assert json.loads(line) == expected[0].tolist(), variant


def command(*arguments):
    program = shutil.which("nf4linear", path=str(Path(sys.executable).parent))
    start = [program] if program else [sys.executable, "-m", "nf4linear.cli.main"]
    return subprocess.run([*start, *map(str, arguments)], capture_output=True, text=True)


def test_generate_command_answers_and_tells_its_speed(demo_packed):
    question = "What is the capital of France?"
    run = command("generate", demo_packed, "-p", question, "--temperature", 0, "-n", 12, "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout
    assert "prefill 37 tokens" in run.stderr and "tokens/s" in run.stderr and "peak memory" in run.stderr


def test_perplexity_command_compares_the_variants(demo_folders, demo_packed, tmp_path):
    scores_file = tmp_path / "scores.json"
    lengths = ("--max-tokens", 256, "--window", 128, "--stride", 120)
    options = (
        "--base",
        demo_folders[0],
        "--text",
        TEXT,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--json",
        scores_file,
    )
    run = command("perplexity", demo_packed, "--compare", *lengths, *options)
    assert run.returncode == 0, run.stderr
    scores = json.loads(scores_file.read_text())
    rows = {row["variant"]: row for row in scores["rows"]}
    assert list(rows) == ["16-bit", "bitsandbytes", "exact", "nf4linear"]
    assert scores["tokens"] == 255
    assert rows["nf4linear"]["perplexity"] == pytest.approx(rows["exact"]["perplexity"], rel=1e-4)
    assert rows["nf4linear"]["perplexity"] == pytest.approx(rows["bitsandbytes"]["perplexity"], rel=2e-2)
    assert rows["nf4linear"]["model_bytes"] < rows["16-bit"]["model_bytes"]
    for variant in rows:
        assert variant in run.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "--dtype float8: known are auto, bfloat16"),
        ({"format": "int3"}, "--format int3: known are nf4"),
        ({"device": "nowhere"}, "--device nowhere"),
        ({"path": "no/such/folder"}, "no/such/folder: is not a folder"),
        ({"variant": "other"}, "variant other: known are 16-bit"),
        ({"variant": "16-bit"}, "it is quantized; name the 16-bit model"),
    ],
)
def test_loading_says_what_to_do_on_a_mistake(demo_packed, options, message):
    options = {"path": str(demo_packed), "device": "cpu", "variant": "nf4linear"} | options
    variant = options.pop("variant")
    with pytest.raises(LoadError, match=re.escape(message)):
        ModelSource(**options).load(variant)


def test_commands_end_on_a_mistake_with_one_line(demo_packed):
    done = CliRunner().invoke(app, ["perplexity", str(demo_packed)])
    assert done.exit_code == 1 and "--text FILE" in done.output and isinstance(done.exception, SystemExit)

"""A real language model end to end: SmolLM2-135M-Instruct, quantized by bitsandbytes, packed, loaded, scored.

The oracle is bitsandbytes' dequantized weights in plain layers ("dequantized" in cli/loading.py), read from the
bitsandbytes checkpoint: no code of this package's formats, packing or kernels is between the file and its logits.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nf4linear
from nf4linear.checkpoint import pack_checkpoint, unpack_checkpoint
from nf4linear.cli.loading import ModelSource
from nf4linear.perplexity import perplexity

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "examples" / "data" / "alice.txt"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders():
    """(16-bit, bitsandbytes) folders below demo/, built on first use."""
    sys.path.insert(0, str(ROOT / "tools"))
    from make_demo_model import make_demo_model

    try:
        return make_demo_model(ROOT / "demo")
    except FileNotFoundError as error:
        pytest.fail(f"{error}; `make test` does this by itself", pytrace=False)


@pytest.fixture(scope="module")
def packed(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack_checkpoint(folders[1], folder)
    return folder


@pytest.fixture(scope="module")
def token_ids(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    return tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0, :2048]


def load(folder, dtype):
    return ModelSource(str(folder), device="cpu", dtype=dtype).load("nf4linear")


def oracle(folder, dtype):
    return ModelSource(str(folder), device="cpu", dtype=dtype).load("dequantized")


@torch.inference_mode()
def logits(model, token_ids):
    return model(token_ids[None, 1000:1128]).logits.float()


def relative_error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 5e-3), ("float32", 1e-5)])
def test_logits_of_the_packed_model_are_the_oracle_s(folders, packed, token_ids, dtype, tolerance):
    model = load(packed, dtype)
    assert sum(isinstance(module, nf4linear.NF4Linear) for module in model.modules()) == 210
    assert model.dtype == getattr(torch, dtype)
    assert relative_error(logits(model, token_ids), logits(oracle(folders[1], dtype), token_ids)) <= tolerance


def test_one_wrong_scale_code_shows_in_the_logits(folders, packed, token_ids):
    model = load(packed, "float32")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.absmax_q[0, 0, 0] ^= 0x10
    assert relative_error(logits(model, token_ids), logits(oracle(folders[1], "float32"), token_ids)) > 1e-5


def test_patched_bitsandbytes_model_equals_the_packed_one(folders, packed, token_ids):
    patched = load(folders[1], "float32")
    assert torch.equal(logits(patched, token_ids), logits(load(packed, "float32"), token_ids))


def test_perplexity_is_the_oracle_s_within_a_thousandth(folders, packed, token_ids):
    ours = perplexity(load(packed, "bfloat16"), token_ids, window=512, stride=384)
    expected = perplexity(oracle(folders[1], "bfloat16"), token_ids, window=512, stride=384)
    assert ours.perplexity == pytest.approx(expected.perplexity, rel=1e-3)


def test_eight_bit_perplexity_is_within_a_hundredth_of_16_bit(folders, token_ids):
    source = ModelSource(str(folders[0]), device="cpu", dtype="bfloat16", format="w8_s8")
    w8 = source.load("nf4linear")
    assert sum(isinstance(module, nf4linear.W8Linear) for module in w8.modules()) == 210
    ours = perplexity(w8, token_ids, window=512, stride=384)
    expected = perplexity(source.load("16-bit"), token_ids, window=512, stride=384)
    assert ours.perplexity == pytest.approx(expected.perplexity, rel=1e-2)


def test_unpacking_gives_the_bitsandbytes_files_back_byte_for_byte(folders, packed, tmp_path):
    unpack_checkpoint(packed, tmp_path / "back")
    before = sorted(file.name for file in folders[1].glob("*.safetensors"))
    assert before == sorted(file.name for file in (tmp_path / "back").glob("*.safetensors"))
    for name in before:
        assert (tmp_path / "back" / name).read_bytes() == (folders[1] / name).read_bytes(), name


NEW_PROCESS = """
import json, sys
import nf4linear
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert "bitsandbytes" not in sys.modules
inputs = tokenizer("The White Rabbit", return_tensors="pt")
print(json.dumps(model.generate(**inputs, max_new_tokens=24, do_sample=False)[0].tolist()))
"""


def test_from_pretrained_in_a_new_process_gives_the_same_tokens(folders, packed):
    run = subprocess.run([sys.executable, "-c", NEW_PROCESS, packed], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    inputs = AutoTokenizer.from_pretrained(packed)("The White Rabbit", return_tensors="pt")
    expected = oracle(folders[1], "auto").generate(**inputs, max_new_tokens=24, do_sample=False)[0].tolist()
    assert json.loads(run.stdout) == expected


def command(*arguments):
    program = shutil.which("nf4linear", path=str(Path(sys.executable).parent))
    start = [program] if program else [sys.executable, "-m", "nf4linear.cli.main"]
    return subprocess.run([*start, *map(str, arguments)], capture_output=True, text=True)


def test_generate_command_answers_and_tells_its_speed(packed):
    run = command("generate", packed, "-p", "What is the capital of France?", "--temperature", 0, "-n", 12, "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout
    assert "prefill 37 tokens" in run.stderr and "tokens/s" in run.stderr and "peak memory" in run.stderr


def test_perplexity_command_compares_the_variants(folders, packed, tmp_path):
    run = command(
        "perplexity", packed, "--base", folders[0], "--text", TEXT, "--max-tokens", 512, "--window", 256, "--stride", 192,
        "--compare", "--json", tmp_path / "scores.json", "--device", "cpu",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    scores = json.loads((tmp_path / "scores.json").read_text())
    rows = {row["variant"]: row for row in scores["rows"]}
    assert list(rows) == ["16-bit", "bitsandbytes", "dequantized", "nf4linear"]
    assert scores["tokens"] == 511
    assert rows["nf4linear"]["perplexity"] == pytest.approx(rows["dequantized"]["perplexity"], rel=1e-3)
    assert rows["nf4linear"]["perplexity"] == pytest.approx(rows["bitsandbytes"]["perplexity"], rel=2e-2)
    assert rows["nf4linear"]["model_bytes"] < 0.5 * rows["16-bit"]["model_bytes"]
    for variant in rows:
        assert variant in run.stdout


def test_commands_say_what_to_do_on_a_mistake(tmp_path, packed):
    missing = command("generate", tmp_path / "nothing", "-p", "x")
    assert missing.returncode == 1 and "no model found" in missing.stderr and "Traceback" not in missing.stderr
    no_text = command("perplexity", packed)
    assert no_text.returncode == 1 and "--text FILE" in no_text.stderr and "Traceback" not in no_text.stderr


def test_packed_folder_loads_as_plain_transformers_model_class(packed):
    model = AutoModelForCausalLM.from_pretrained(packed)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.num_parameters() == 134_515_008

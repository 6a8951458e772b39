"""The commands generate and perplexity where the text, the terminal or the pipe is not what it should be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from nf4linear.cli.main import app


@pytest.fixture(scope="module")
def model(tiny_packed, tmp_path_factory) -> Path:
    """A packed model with a tokenizer of single characters."""
    folder = Path(shutil.copytree(tiny_packed(), tmp_path_factory.mktemp("cli") / "model"))
    vocabulary = {"<unk>": 0, **{chr(32 + i): i + 1 for i in range(1, 95)}, "é": 96, "語": 97}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def start(*args: object, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "nf4linear.cli.main", *map(os.fspath, args)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment
    )


def run(*args: object, code: int, **environment: str) -> tuple[bytes, bytes]:
    process = start(*args, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code and b"Traceback" not in err, err
    return out, err


def test_a_locale_without_a_sign_does_not_cost_the_result(model, tmp_path):
    (tmp_path / "text").write_text("hello, world " * 5)
    command = ("perplexity", model, "--text", tmp_path / "text", "--window", "16")
    out, _ = run(*command, code=0, PYTHONIOENCODING="ascii")
    assert b"nf4linear" in out and b"?" in out  # the sign of plus and minus


def test_a_text_of_two_tokens_gives_json(model, tmp_path):
    (tmp_path / "text").write_text("ab")
    run("perplexity", model, "--text", tmp_path / "text", "--window", "16", "--json", tmp_path / "scores", code=0)
    row = json.loads((tmp_path / "scores").read_text(), parse_constant=pytest.fail)["rows"][0]
    assert row["perplexity"] > 1 and row["standard_error"] is None


def test_a_data_set_without_its_package_names_the_extra(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    done = CliRunner().invoke(app, ["perplexity", str(model), "--dataset", "wikitext", "--window", "16"])
    assert done.exit_code == 1 and "pip install 'nf4linear[datasets]'" in done.output


def test_text_that_is_none_is_named(model, tmp_path):
    (tmp_path / "text").write_bytes(b"\xff\xfeh\x00i\x00")
    _, err = run("perplexity", model, "--text", tmp_path / "text", "--window", "16", code=1)
    assert b"text: is no UTF-8 text" in err.replace(b"\n", b"")
    _, err = run("generate", model, "--prompt", b"\xe9", "-n", "1", code=1)
    assert b"the prompt is no UTF-8 text" in err


def test_a_reader_that_leaves_early_is_no_error(model):
    process = start("generate", model, "--prompt", "hello", "-n", "40")
    process.stdout.close()
    process.stdin.close()
    assert process.wait(timeout=120) == 1
    assert b"rror" not in process.stderr.read()

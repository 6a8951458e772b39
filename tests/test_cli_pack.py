"""The commands pack, unpack and info as a user types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints import NF4, Q_PROJ, edit, files, save_bnb, save_plain
from nf4linear import checkpoint
from nf4linear.checkpoint import pack_checkpoint
from nf4linear.checkpoint.writer import OutputFolder
from nf4linear.cli.main import COMMANDS, app
from nf4linear.sizes import parse_size


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture(scope="module")
def nf4(tmp_path_factory) -> Path:
    return save_bnb(tmp_path_factory.mktemp("nf4") / "model", **NF4)


def test_pack_info_unpack(nf4, tmp_path):
    assert "14 layers packed" in run("pack", nf4, tmp_path / "packed")
    table = run("info", tmp_path / "packed")
    assert "14 x nf4, blocksize 64, double quantization" in table and "lm_head" in table and "none" in table
    assert "byte for byte" in run("unpack", tmp_path / "packed", tmp_path / "back")
    assert files(tmp_path / "back") == files(nf4)


def test_options_reach_the_checkpoint(tmp_path):
    plain = save_plain(tmp_path / "plain")
    run(
        "pack", plain, tmp_path / "a", "--format", "fp4", "--blocksize", 128, "--no-double-quant", "--skip", "mlp", "-q"
    )
    config = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert config["modules"]["default"] == {"format": "fp4", "blocksize": 128, "double_quant": False}
    assert "model.layers.0.mlp.up_proj" in config["modules_to_not_convert"]
    run("pack", plain, tmp_path / "b", "--lm-head", "w8", "--max-shard-size", "9KB", "--quiet")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    assert "dequantized to float16" in run("unpack", tmp_path / "b", tmp_path / "c", "--dequantize", "float16", "-q")
    assert checkpoint.describe(tmp_path / "c").kind == "plain"


def test_errors_are_a_line_and_status_1(nf4, tmp_path):
    run("pack", nf4, tmp_path / "packed", "-q")
    assert "--force" in run("pack", nf4, tmp_path / "packed", code=1)
    assert "nowhere [/b]: is not a folder" in run("info", tmp_path / "nowhere [/b]", code=1)
    assert "expected 'nf4linear'" in run("unpack", nf4, tmp_path / "back", code=1)
    assert "packed as it is" in run("pack", nf4, tmp_path / "other", "--format", "nf4", code=1)
    run("pack", nf4, tmp_path / "packed", "--force", "-q")


def test_info_reports_problems(nf4, tmp_path):
    run("pack", nf4, tmp_path / "packed", "-q")
    edit(tmp_path / "packed", lambda held: held.pop(Q_PROJ + ".nested_absmax"))
    assert Q_PROJ in run("info", tmp_path / "packed", code=1).replace("\n", "")
    described = json.loads(run("info", tmp_path / "packed", "--json", code=1))
    assert described["kind"] == "packed" and f"{Q_PROJ}.nested_absmax" in described["problems"][0]
    assert described["formats"] == {"nf4, blocksize 64, double quantization": 14}


def test_a_stopped_run_says_how_to_go_on(nf4, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "pack_checkpoint", stop)
    assert "goes on" in run("pack", nf4, tmp_path / "packed", code=130)


def test_a_finished_run_that_goes_on_draws_one_line_in_80_columns(nf4, tmp_path, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # draw as on a terminal
    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "_publish", stop)
        with pytest.raises(KeyboardInterrupt):
            pack_checkpoint(nf4, tmp_path / "packed", max_shard_size="60KB", progress=False)
    capsys.readouterr()
    pack_checkpoint(nf4, tmp_path / "packed", max_shard_size="60KB")
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", drawn) if line.strip()]
    shards = sorted(path.name for path in (tmp_path / "packed").glob("*.safetensors"))
    assert len(shards) > 1 and all(f"{shard}: complete from an earlier run" in lines for shard in shards)
    last = lines[-1]
    assert len(last) <= 80 and last.startswith("Packing model-0000") and last.endswith("0:00:00")
    assert re.search(r"([\d.]+)/\1 kB", last), last


def test_hub_name_is_downloaded(nf4, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in allow_patterns)
        return str(nf4)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    run("pack", "owner/model", tmp_path / "packed", "--revision", "abc", "-q")
    assert asked == [("owner/model", "abc")]
    assert "base_model: owner/model" in (tmp_path / "packed" / "README.md").read_text()


def test_hub_failure_is_told(tmp_path, monkeypatch):
    import huggingface_hub

    def snapshot_download(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert "offline" in run("pack", "owner/model", tmp_path / "packed", code=1)


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5 * 10**9), ("1.5MiB", 3 << 19), ("9kb", 9000), (77, 77)])
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


def test_help_is_quick_and_complete():
    """The list of commands, and the help of those that work on folders, must not wait for torch."""
    code = (
        "import sys; from typer.testing import CliRunner; from nf4linear.cli.main import app\n"
        "for command in ([], ['pack'], ['unpack'], ['info']):\n"
        "    print(CliRunner().invoke(app, [*command, '--help']).output)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in COMMANDS) and "SRC" in result.stdout and "PATH" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    assert "Usage" in run(name, "--help")


def test_unknown_command():
    assert "No such command" in run("quantise", code=2)


def test_a_reader_that_leaves_early_is_no_error(nf4, tmp_path):
    run("pack", nf4, tmp_path / "packed", "-q")
    command = [sys.executable, "-m", "nf4linear.cli.main", "info", str(tmp_path / "packed"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr.read() == b""

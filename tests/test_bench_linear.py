"""The linear benchmark without a GPU: what its reports make of rows, and how its command refuses."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from nf4linear.bench import generate, gpu, linear, linear_report, linear_w8, mixed
from nf4linear.bench.record import write_record
from nf4linear.cli.bench import bench
from nf4linear.formats import EightBitSpec

CEILINGS = {"read_GBps": 4350.0, "copy_GBps": 4240.0, "bf16_TFLOPs": 790.0}


def row(impl, m, us, launch="plain", **extra):
    return {
        "op": "linear", "impl": impl, "format": "nf4-dq", "n": 4096, "k": 4096, "m": m, "dtype": "bf16",
        "launch": launch, "protocol": "cold-graph", "us": us, "roof_us": 2.0, "rel_err": 2e-3,
    } | extra  # fmt: skip


def record(rows):
    return {
        "machine": "NVIDIA Test", "driver": "1", "versions": {"torch": "2"}, "command": "nf4linear bench linear",
        "date": "2026-01-01", "commit": "abc", "ceilings": CEILINGS, "rows": rows,
    }  # fmt: skip


ROWS = [
    row("nf4linear", 1, 5.0), row("nf4linear", 1, 4.0, "pdl"), row("dequant_gemm", 1, 30.0), row("torch", 1, 13.0),
    row("bitsandbytes", 1, 10.0, rel_err=2.2e-3), row("humming", 1, 8.0, rel_err=None), row("nf4linear", 8, 6.0),
]  # fmt: skip


def test_the_table_is_made_from_the_rows():
    lines = linear_report.markdown(record(ROWS)).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    header, one, eight = cells
    by_name = dict(zip(header, one, strict=True))
    assert (by_name["nf4linear"], by_name["nf4linear, dependent"], by_name["humming"]) == ("5.0", "4.0", "8.0")
    # Faster than the fastest peer; our own fallback is no peer, and dependent launches are not compared.
    assert (by_name["of roof"], by_name["faster"]) == ("40 %", "1.60x")
    assert (by_name["error"], by_name["error of bitsandbytes"]) == ("2.00e-03", "2.20e-03")
    assert eight[0] == "8" and eight.count("-") == 7


@pytest.mark.parametrize("dtype", linear.DTYPES)
def test_a_row_says_which_activations_a_contender_was_given(dtype):
    """That of bitsandbytes' int8 layer, which takes float16 alone, stands beside the others all the same."""
    weight = SimpleNamespace(
        spec=EightBitSpec("w8_s8", 4096, 4096), op="linear_w8", format_names={}, format_name="w8_s8"
    )
    contenders = [gpu.Contender("nf4linear", (), 1e6), gpu.Contender("bitsandbytes", (), 1e6, takes=torch.float16)]
    rows = [linear._row(weight, c, 1, dtype, 9.0, CEILINGS) | {"rel_err": 1e-3} for c in contenders]
    assert [row["dtype"] for row in rows] == [dtype, dtype]
    assert [row.get("activations") for row in rows] == [None, "fp16" if dtype == "bf16" else None]
    text = linear_report.markdown(record(rows))
    assert text.count("## ") == 1 and f"| 1 | {rows[0]['roof_us']:.1f} | 9.0 | 9.0 |" in text
    said = "bitsandbytes is given fp16 activations: it takes no others."
    assert (said in text) == (dtype == "bf16") and text.count("is given") == (dtype == "bf16")


def test_the_tuning_table_sorts_by_time():
    rows = [
        row("nf4linear", 8, us, launch, variant=variant)
        for variant, plain, pdl in (("table", 6.0, 5.5), ("1x8/1", 7.0, 5.0), ("2x8/2", 5.9, 5.8))
        for launch, us in (("plain", plain), ("pdl", pdl))
    ]
    last = linear_report.tune_markdown(record(rows)).splitlines()[-1]
    assert last.index("2x8/2 5.90") < last.index("1x8/1 7.00") < last.rindex("1x8/1 7.00") < last.rindex("2x8/2 5.90")


def test_the_plot_is_a_png():
    pytest.importorskip("matplotlib")
    assert linear_report.plot(record(ROWS)).startswith(b"\x89PNG")


def test_the_generation_table():
    rows = [
        {"model": "m", "impl": "nf4linear", "batch": 1, "prompt": 128, "new_tokens": 128, "compile": True,
         "ttft_ms": 20.04, "tok_s": 100.0, "peak_GiB": 6.0},
    ]  # fmt: skip
    assert "| m | nf4linear | compiled | 128 | 128 | 20.0 | 100.0 | 6.00 |" in generate.markdown(record(rows))


def test_a_record_is_written_whole(tmp_path):
    path = tmp_path / "results" / "x-linear.json"
    write_record(path, record(ROWS))
    assert json.loads(path.read_text())["rows"] == ROWS
    assert [p.name for p in path.parent.iterdir()] == ["x-linear.json"]


def test_generation_writes_each_row(tmp_path, monkeypatch):
    row = {"model": "m", "impl": "16-bit", "compile": False, "prompt": 8, "new_tokens": 8, "ttft_ms": 1.0, "tok_s": 2.0,
           "peak_GiB": 1.0}  # fmt: skip

    def sweep(*args):
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu, "record_of", lambda rows, ceilings: record(rows))
    monkeypatch.setattr(generate, "sweep", sweep)
    CliRunner().invoke(bench, ["generate", "--output", str(tmp_path / "g.json")])
    assert json.loads((tmp_path / "g.json").read_text()) == record([row])
    assert "| m | 16-bit | eager | 8 |" in (tmp_path / "g.md").read_text()


@pytest.mark.parametrize("command", ["linear", "mixed"])
def test_layers_and_products_write_each_cell(tmp_path, monkeypatch, command):
    cell = ROWS if command == "linear" else [
        {"op": "mixed", "variant": "f16_s8", "impl": "nf4linear", "launch": "plain", "m": 8, "n": 8, "k": 64, "us": 2.0,
         "TFLOPs": 1.0, "of_plain": 0.9, "rel_err": 1e-3},
    ]  # fmt: skip

    def sweep(*args):
        yield cell
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu, "record_of", lambda rows, ceilings: record(rows))
    monkeypatch.setattr(gpu, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr({"linear": linear, "mixed": mixed}[command], "sweep", sweep)
    CliRunner().invoke(bench, [command, "--output", str(tmp_path / "x.json")])
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == cell
    assert (tmp_path / "x.md").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["linear", "--shape", "4096"], "N x K such as"),
        (["linear", "--dtype", "fp32"], "--dtype takes bf16, fp16"),
        (["linear", "--peer", "marlin"], "--peer takes torch, bitsandbytes, humming; got marlin"),
        (["generate", "--impl", "x"], "--impl takes"),
    ],
)
def test_commands_refuse_before_they_measure(monkeypatch, arguments, text):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 1 and text in done.output


def test_a_machine_without_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(bench, ["linear"])
    assert done.exit_code == 1 and "NVIDIA GPU" in done.output


@pytest.mark.parametrize(
    ("file", "pattern", "tried"),
    [
        ("small_batch_plan.h", r"\{(\d+), (\d+), 8\}", linear.TUNE_SHAPES),
        ("small_wgmma_plan.h", r"\{(\d+), (\d+), \d, \d, \d\}", linear.TUNE_WGMMA_SHAPES),
        ("gemm_wgmma_shape.h", r"\{(\d+), (\d), \d+, \d+, \d+\}", linear.TUNE_GEMM_SHAPES),
        ("small_w8_plan.h", r"\{(\d+), (\d+), 8\}", linear_w8.TUNE_SHAPES),
        ("small_wgmma_w8_plan.h", r"\{(\d+), (\d), (\d), \d+\}", linear_w8.TUNE_WGMMA_SHAPES),
        ("gemm_w8_plan.h", r"\{(\d+), (\d), \d+\}", linear_w8.TUNE_GEMM_SHAPES),
    ],
    ids=lambda value: value if str(value).endswith(".h") else "",
)
def test_tuning_tries_the_shapes_that_are_compiled(file, pattern, tried):
    text = (Path(__file__).parents[1] / "csrc" / file).read_text()
    assert tuple(tuple(map(int, shape)) for shape in re.findall(pattern, text)) == tried


def test_tuning_tries_every_number_of_slices():
    text = (Path(__file__).parents[1] / "csrc/gemm_wgmma_plan.h").read_text()
    most = int(re.search(r"GEMM_MOST_SLICES = (\d);", text).group(1))
    assert "GEMM_FOUR_BY_TWO = GEMM_MOST_SLICES + 1" in text
    assert {str(n): n for n in range(1, most + 1)} | {"2+2": most + 1} == linear.TUNE_GEMM_SLICES


def test_tuning_tries_as_many_tokens_as_the_prefill_engine_takes():
    text = (Path(__file__).parents[1] / "csrc/dispatch.h").read_text()
    most = int(re.search(r"GEMM_LAST_TOKENS = (\d+)", text).group(1))
    assert most == linear.TUNE_MOST_TOKENS


def test_tuning_tries_the_mma_shapes_too():
    text = (Path(__file__).parents[1] / "csrc/gemm_mma_plan.h").read_text()
    assert tuple(map(int, re.findall(r"\{(\d+), \d+\}", text))) == linear.TUNE_GEMM_MMA_SHAPES

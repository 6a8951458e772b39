"""The CPU benchmark: its rows on small shapes, its tables, and how its command refuses."""

import pytest
import torch
from typer.testing import CliRunner

from nf4linear import native
from nf4linear.bench import cpu, cpu_generate, cpu_report
from nf4linear.cli.bench import bench
from nf4linear.generation import Generation


@pytest.fixture
def small(monkeypatch):
    """Weights that fit a test: two copies of each, a small memory to read, and few rounds."""
    if not native.library("cpu"):
        pytest.skip("no CPU library")
    monkeypatch.setattr(cpu, "copies_of", lambda nbytes: 2)
    monkeypatch.setattr(cpu, "READ_BYTES", 1 << 16)
    yield
    torch.set_float32_matmul_precision("highest")


def test_rows_table_and_plot(small):
    pytest.importorskip("matplotlib")
    with torch.inference_mode():
        cells = list(cpu.sweep([(32, 128)], [1, 3], 0.0))
    rows = [row for cell in cells for row in cell]
    assert {(row["op"], row["m"]) for row in rows} == {(op, m) for op in ("linear", "linear_w8") for m in (1, 3)}
    ours = {row["dtype"]: row for row in cells[0] if row["impl"] == "nf4linear"}
    assert set(ours) == {"bf16", "fp32", "fp32-medium"} and all(row["ours_faster"] == 1 for row in ours.values())
    assert ours["fp32"]["rel_err"] < 1e-6
    assert "linear 32x128 M=1" in cpu_report.progress_line(cells[0])
    record = cpu.record_of(rows, "nf4linear bench cpu", ceilings={"read_GBps": 1.0})
    lines = cpu_report.markdown(record).splitlines()
    assert sum(line.startswith("| 3 | fp32 |") for line in lines) >= 4
    assert cpu_report.plot(record).startswith(b"\x89PNG")


def test_speed_ups_of_generation_are_medians_of_the_rounds_ratios():
    def made(seconds):
        return Generation(
            "", token_ids=[1] * 11, prompt_tokens=3, prefill_seconds=0.5, decode_seconds=seconds, peak_bytes=None
        )

    done = [{cpu_generate.PEER: made(2.0), "nf4linear NF4": made(t)} for t in (1.0, 0.5, 2.0)]
    peer, ours = cpu_generate.rows_of("m", done)
    assert (peer["over_bitsandbytes"], ours["over_bitsandbytes"], ours["tok_s"]) == (1.0, 2.0, 10.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--no-linear"], "nothing is left to measure"), (["no/such/folder", "--no-linear"], "no/such/folder")],
)
def test_the_command_refuses_before_it_measures(arguments, text):
    done = CliRunner().invoke(bench, ["cpu", *arguments])
    assert done.exit_code == 1 and text in done.output


def test_a_quantized_model_is_refused(tiny_packed):
    done = CliRunner().invoke(bench, ["cpu", str(tiny_packed()), "--no-linear"])
    assert done.exit_code == 1 and "16-bit model" in done.output.replace("\n", " ")

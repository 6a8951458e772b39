"""The benchmark of mixed-input products and the laboratory of conversions without a GPU: what they make of rows."""

import pytest
from typer.testing import CliRunner

from nf4linear import mixed
from nf4linear.bench import mixed as mixed_bench
from nf4linear.cli.bench import bench
from nf4linear.lab import convert


def row(variant, tflops, of_plain, m=3456, n=4096, k=2048):
    return {
        "op": "mixed", "impl": "torch" if variant in mixed_bench.PLAIN else "nf4linear", "variant": variant, "m": m,
        "n": n, "k": k, "dtype": "fp16", "launch": "plain", "protocol": "cold-graph", "us": 80.0, "TFLOPs": tflops,
        "of_plain": of_plain, "rel_err": 2e-4,
    }  # fmt: skip


RECORD = {
    "machine": "NVIDIA Test", "driver": "1", "versions": {"torch": "2"}, "command": "nf4linear bench mixed",
    "date": "2026-01-01", "commit": "abc", "ceilings": {},
    "rows": [row("f16_f16", 700.0, 1.0), row("f16_s8", 695.0, 0.993), row("f16_f16", 650.0, 1.0, m=64, n=64, k=64)],
}  # fmt: skip


def test_the_table_is_made_from_the_rows():
    lines = [line for line in mixed_bench.markdown(RECORD).splitlines() if line.startswith("| ")]
    assert lines[0] == "| variant | 3456 x 4096 x 2048 | 64 x 64 x 64 | error |"
    assert lines[1:] == ["| f16_f16 | 700 (1.00) | 650 (1.00) | 2.0e-04 |", "| f16_s8 | 695 (0.99) | - | 2.0e-04 |"]


def test_the_plot_is_a_png():
    pytest.importorskip("matplotlib")
    assert mixed_bench.plot(RECORD).startswith(b"\x89PNG")


def test_ten_bars_at_the_published_shape():
    assert mixed_bench.SHAPES[0] == (3456, 4096, 2048)
    assert len({*mixed_bench.PLAIN, *mixed.VARIANTS}) == 10


@pytest.mark.parametrize("options", [["mixed", "--quick"], ["linear", "--format", "w8", "--quick"]])
def test_commands_say_that_they_need_a_gpu(options):
    result = CliRunner().invoke(bench, options)
    assert result.exit_code != 0 and "GPU" in result.output


SASS = """
\tFunction : _ZN4nf4l3lab12convert_loopILNS0_3HowE{how}E6__halfNS_4W8U8EEEvPji
        /*0000*/                   LDC R1, c[0x0][0x28] ;
{body}
        /*0f00*/                   EXIT ;
        /*0f10*/                   NOP;
"""


def test_instructions_of_a_conversion_are_those_beyond_the_empty_loop():
    def kernel(how, opcodes):
        lines = (f"        /*{16 * i:04x}*/         @!P0 {opcode} R2, R3, R4 ;" for i, opcode in enumerate(opcodes))
        return SASS.format(how=how, body="\n".join(lines))

    loop, plain, packed = ["IMAD"] * 4, ["I2F.F16"] * 40, ["PRMT"] * 16
    sass = kernel(0, loop) + kernel(1, loop + plain) + kernel(2, loop + packed)
    counts = convert.counts_of(sass, loop_weights=16)
    assert counts == {("plain", "u8_f16"): 10.0, ("fast", "u8_f16"): 4.0}


def test_the_report_of_conversions():
    rows = [
        {"op": "convert", "conversion": "u8_f16", "how": how, "ns_per_million": ns, "instructions_for_four": count}
        for how, ns, count in (("nothing", 10.0, None), ("plain", 80.0, 12.5), ("fast", 20.0, None))
    ]
    rows += [
        {"op": "conformance", "way": way, "m": 1, "n": 2, "k": 3, "us": us, "TFLOPs": 100 / us}
        for way, us in (("narrow loads", 2.0), ("offline reordering", 1.0), ("torch f16 x f16", 0.5))
    ]
    text = convert.report(rows)
    assert "| u8 -> f16 | 12.50 | - | 80.0 | 20.0 | 4.00x | 1.6x, 10 and 6 instructions |" in text
    assert "| narrow loads | 2.0 | 50 | 0.50 |" in text and "| torch f16 x f16 | 0.5 | 200 | 2.00 |" in text

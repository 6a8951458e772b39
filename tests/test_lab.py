"""The dequantize laboratory without a GPU: its binary file in Python and C++, damaged files, figures and tables."""

import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nf4linear import reference
from nf4linear.cli.main import app
from nf4linear.formats import FourBitSpec
from nf4linear.lab import experiment, generate, profile, program, tables, verify, weight_file
from nf4linear.lab.generate import Case
from operands import same_bits

LAB = Path(__file__).parents[1] / "csrc" / "lab"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def fresh(n: int = 24, k: int = 100, blocksize: int = 32, kind: str = "fp32") -> weight_file.LabWeight:
    spec = FourBitSpec("nf4", n, k, blocksize)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    return weight_file.with_tables(spec, reference.quantize(spec, weight), kind)


@pytest.fixture(scope="module")
def checker(tmp_path_factory) -> Path:
    """nf4l_check_file, the C++ reader on its own."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("checker") / "nf4l_check_file"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, *flags, str(LAB / "check_file.cpp"), "-o", str(path)], check=True)
    return path


def check(checker: Path, path: Path) -> subprocess.CompletedProcess:
    return subprocess.run([checker, path], capture_output=True, text=True, check=False)


# ---- the binary file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("shape", [(24, 100), (7, 33), (1, 1), (16, 4096)])
def test_round_trip(shape, kind, tmp_path):
    weight = fresh(*shape, kind=kind)
    weight_file.write(tmp_path / "w.bin", weight)
    back = weight_file.read(tmp_path / "w.bin")
    assert (back.spec, back.tables) == (weight.spec, kind)
    assert back.canonical.keys() == weight.canonical.keys()
    for name, tensor in weight.canonical.items():
        assert torch.equal(back.canonical[name], tensor), name


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_the_cpp_reader_reads_the_same(checker, kind, tmp_path):
    weight = fresh(kind=kind)
    weight_file.write(tmp_path / "w.bin", weight)
    done = check(checker, tmp_path / "w.bin")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:8] == ["rows", "24", "columns", "100", "blocksize", "32", "tables", kind]
    assert float(words[9]) == pytest.approx(weight.canonical["nested_offset"].item(), rel=1e-7)


def test_fp16_tables_are_the_rounded_ones():
    exact, rounded = fresh(kind="fp32"), fresh(kind="fp16")
    wanted = exact.canonical["nested_absmax"].half().float()
    assert torch.equal(rounded.canonical["nested_absmax"], wanted)
    assert not torch.equal(wanted, exact.canonical["nested_absmax"])


def set_field(offset: int, kind: str, value):
    def damage(data: bytearray) -> None:
        struct.pack_into("<" + kind, data, offset, value)

    return damage


def flip_bit(at: int):
    def damage(data: bytearray) -> None:
        data[at] ^= 1

    return damage


def cut(size: int):
    def damage(data: bytearray) -> None:
        del data[size:]

    return damage


DAMAGED = {
    "empty": cut(0),
    "cut in the magic": cut(5),
    "cut in the header": cut(63),
    "header only": cut(64),
    "last byte missing": cut(-1),
    "one byte too many": lambda data: data.append(0),
    "wrong magic": flip_bit(0),
    "text mode line ends": lambda data: data.__delitem__(6),
    "version 0": set_field(8, "I", 0),
    "version 2": set_field(8, "I", 2),
    "big-endian version": set_field(8, "I", 1 << 24),
    "table type 2": set_field(12, "I", 2),
    "other table type": set_field(12, "I", 1),
    "no rows": set_field(16, "Q", 0),
    "no columns": set_field(24, "Q", 0),
    "one row more": set_field(16, "Q", 25),
    "one row less": set_field(16, "Q", 23),
    "shape that overflows": set_field(16, "Q", 2**63),
    "huge shape": set_field(24, "Q", 2**40),
    "blocksize 0": set_field(32, "I", 0),
    "blocksize 48": set_field(32, "I", 48),
    "blocksize 8192": set_field(32, "I", 8192),
    "other blocksize": set_field(32, "I", 64),
    "nested blocksize 128": set_field(36, "I", 128),
    "nested blocksize 0": set_field(36, "I", 0),
    "offset NaN": set_field(40, "f", float("nan")),
    "offset infinite": set_field(40, "f", float("-inf")),
    "other offset": set_field(40, "f", 0.25),
    "other checksum": flip_bit(44),
    "payload size": set_field(48, "Q", 7),
    "huge payload size": set_field(48, "Q", 2**64 - 1),
    "reserved field": set_field(56, "Q", 1),
    "a code flipped": flip_bit(64),
    "a scale flipped": flip_bit(64 + 1200),
    "last byte flipped": flip_bit(-1),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_by_both_readers(checker, name, tmp_path):
    path = tmp_path / "damaged.bin"
    weight_file.write(path, fresh())
    data = bytearray(path.read_bytes())
    DAMAGED[name](data)
    path.write_bytes(data)
    with pytest.raises(weight_file.DamagedFileError, match=r"damaged\.bin: "):
        weight_file.read(path)
    done = check(checker, path)
    assert done.returncode == 1 and "damaged.bin: " in done.stderr, done


def test_every_byte_of_the_header_counts(checker, tmp_path):
    """Each of the 64 bytes in turn has one bit, then all bits, flipped."""
    path = tmp_path / "damaged.bin"
    weight_file.write(path, fresh())
    whole = path.read_bytes()
    for at in range(64):
        for bits in (1, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
            with pytest.raises(weight_file.DamagedFileError):
                weight_file.read(path)
            assert check(checker, path).returncode == 1, (at, bits)
    path.write_bytes(whole)
    assert check(checker, path).returncode == 0


def sealed(data: bytearray) -> bytearray:
    """`data` with the checksum that fits it."""
    data[44:48] = bytes(4)
    data[44:48] = zlib.crc32(data).to_bytes(4, "little")
    return data


@pytest.mark.parametrize("offset", [float("nan"), float("inf")])
def test_an_offset_that_is_not_finite_is_refused_even_with_its_checksum(checker, offset, tmp_path):
    path = tmp_path / "w.bin"
    weight_file.write(path, fresh())
    data = bytearray(path.read_bytes())
    assert sealed(bytearray(data)) == data
    set_field(40, "f", offset)(data)
    path.write_bytes(sealed(data))
    with pytest.raises(weight_file.DamagedFileError, match=f"the offset is {offset}"):
        weight_file.read(path)
    done = check(checker, path)
    assert done.returncode == 1 and "the offset is not a finite number" in done.stderr


def test_an_offset_that_is_not_finite_is_not_written(tmp_path):
    weight = fresh()
    weight.canonical["nested_offset"].fill_(float("inf"))
    with pytest.raises(ValueError, match=r"w\.bin: the weight's nested_offset is inf"):
        weight_file.write(tmp_path / "w.bin", weight)
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_named(checker, tmp_path):
    done = check(checker, tmp_path / "nothing.bin")
    assert done.returncode == 1 and "nothing.bin: cannot be opened" in done.stderr


# ---- figures and tables ---------------------------------------------------------------------------------------------


def test_errors_of_known_differences():
    wanted = torch.tensor([[1.0, -2.0], [4.0, 1.0]])
    errors = verify.compare(wanted + torch.tensor([[0.5, 0.0], [0.0, -0.5]]), wanted)
    assert (errors.mae, errors.max_error, errors.different) == (0.25, 0.5, 2)
    assert errors.rmse == pytest.approx(0.125**0.5) and errors.relative_mae == pytest.approx(0.125)
    assert not errors.passed and not errors.exact


def test_equal_outputs_pass_and_one_nan_fails():
    wanted = torch.randn(8, 8, dtype=torch.bfloat16)
    same = verify.compare(wanted.clone(), wanted)
    assert same.passed and same.exact
    unwritten = wanted.clone()
    unwritten[3, 3] = float("nan")
    assert not verify.compare(unwritten, wanted).passed


def test_shapes_and_types_must_agree():
    with pytest.raises(ValueError, match="cannot compare"):
        verify.compare(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float16))


def rows(us: dict[str, float]) -> list[dict]:
    return [{"impl": impl, "us": t, "roof_us": 10.0, "gb_per_s": 1e3 / t, "dtype": "fp16"} for impl, t in us.items()]


def test_the_published_times_give_the_published_tables():
    published = {"v0": 113.9, "v1": 79.1, "v2": 65.2, "v3": 43.1, "bitsandbytes": 48.8}
    alone = {"vectors_alone": 113.9 / 1.09, "shifts_alone": 113.9 / 1.03}
    lines = tables.ladder_table(rows(published)).splitlines()
    assert [line.split(" | ")[4] for line in lines[2:6]] == ["1.00", "1.44", "1.75", "2.64"]
    assert lines[5].split(" | ")[-1].startswith("1.13")
    interactions = [line.split(" | ")[3] for line in tables.interaction_table(rows(published | alone)).splitlines()[2:]]
    assert interactions == ["1.00", "1.11", "1.47"]  # from rounded times; the report's own are in the last column
    last = [line.split(" | ")[-1] for line in tables.interaction_table(rows(published | alone)).splitlines()[2:]]
    assert last == ["1.00 |", "1.12 |", "1.48 |"]


def test_chart(tmp_path):
    pytest.importorskip("matplotlib")
    tables.ladder_chart(tmp_path / "ladder.png", rows({"v0": 80.0, "v4": 15.0, "bitsandbytes": 29.0}), "title")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_committed_tables_are_made_from_the_committed_rows():
    stem = Path(__file__).parents[1] / "benchmarks" / "results" / "h200-dequant"
    record = json.loads(stem.with_suffix(".json").read_text())
    text = stem.with_suffix(".md").read_text()
    assert text == experiment.results_text(record) and record["command"] in text


# ---- the command ----------------------------------------------------------------------------------------------------


def test_generate_writes_a_file_and_its_reference(checker, tmp_path):
    options = ["--rows", "16", "--columns", "96", "--folder", str(tmp_path), "--dtype", "fp16", "--dtype", "bf16"]
    done = CliRunner().invoke(app, ["lab", "generate", *options])
    assert done.exit_code == 0, done.output
    case = Case(16, 96)
    lab = weight_file.read(case.weight_path(tmp_path))
    assert check(checker, case.weight_path(tmp_path)).returncode == 0
    for dtype in ("fp16", "bf16"):
        got = generate.read_raw(case.reference_path(tmp_path, dtype), case, dtype)
        assert same_bits(got, reference.dequantize(lab.spec, lab.canonical, generate.DTYPES[dtype]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--dtype", "fp8"], "--dtype takes fp32, fp16, bf16; got fp8"),
        (["generate", "--blocksize", "48"], "blocksize must be one of"),
        (["generate", "--tables", "fp8"], "tables must be one of fp32, fp16"),
        (["profile", "--script"], "run `nf4linear lab build` first"),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["lab", *arguments, "--folder", str(tmp_path)])
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["test", "bench"])
def test_steps_that_run_kernels_say_that_they_need_a_gpu(command, tmp_path):
    done = CliRunner().invoke(app, ["lab", command, "--folder", str(tmp_path)])
    assert done.exit_code == 1 and "needs an NVIDIA GPU" in " ".join(done.output.split())


def test_profile_script_names_every_stage():
    script = profile.script(Path("lab"), Path("w.bin"), program.STAGES, "fp16")
    assert script.startswith("#!/bin/sh\n") and "--clock-control none" in script
    assert f"--stages {','.join(program.STAGES)} " in script


def test_counters_become_a_table():
    metric = "gpu__time_duration.sum"
    text = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    text += f'"0","void lab::v0<__half>(lab::LadderWeight, T1 *)","{metric}","us","77.5"\n'
    text += f'"1","void dequantize_kernel<FlatOrder, __half>(T1)","{metric}","us","11.0"\n'
    lines = profile.counter_table(text).splitlines()
    assert lines[0] == "| counter | v0 | v4 |" and lines[2] == "| time | 77.5 us | 11.0 us |"


def test_failure_of_the_program_keeps_its_own_words(tmp_path):
    broken = tmp_path / "nf4l_lab"
    broken.write_text("#!/bin/sh\necho 'w.bin: wrong magic' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(program.ProgramError, match="wrong magic"):
        program.run_stages(broken, tmp_path / "w.bin", ("v4",), ("fp16",))


@pytest.mark.parametrize(("missing", "text"), [("c++", r"install g\+\+ or clang\+\+"), ("gpu", "such as --arch 90")])
def test_build_says_the_next_step(tmp_path, monkeypatch, missing, text):
    said = {
        "c++": "CMake Error at CMakeLists.txt:7 (project):\n  No CMAKE_CXX_COMPILER could be found.",
        "gpu": 'CMake Error:\n  CUDA_ARCHITECTURES is set to "native", but no GPU was detected.',
    }
    cmake = tmp_path / "cmake"
    cmake.write_text(f"#!/bin/sh\necho '{said[missing]}' >&2\nexit 1\n")
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(program, "SOURCE", tmp_path)  # an installed package has none
    with pytest.raises(program.ProgramError, match=text):
        program.build(tmp_path / "lab")

"""Damaged, foreign, interrupted: pack and unpack say what is wrong and lose nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from checkpoints import INT8, NF4, Q_PROJ, edit, edit_json, files, save_bnb, save_plain, tensors
from nf4linear.checkpoint import (
    CheckpointError,
    describe,
    pack_checkpoint,
    shard_plan,
    shards,
    unpack_checkpoint,
    validate_packed,
    writer,
)

STATE = Q_PROJ + ".weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("good")
    sources = {"nf4": save_bnb(folder / "nf4", **NF4), "int8": save_bnb(folder / "int8", **INT8)}
    for name in list(sources):
        sources[f"{name}-packed"] = folder / f"{name}-packed"
        pack_checkpoint(sources[name], sources[f"{name}-packed"], progress=False)
    sources["plain"] = save_plain(folder / "plain")
    return sources


def state(held: dict, **fields) -> None:
    """Change fields of a quant_state's JSON; a field set to None goes away."""
    value = json.loads(bytes(held[STATE].tolist())) | fields
    text = json.dumps({key: field for key, field in value.items() if field is not None})
    held[STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8)


def put(suffix: str, make):
    return lambda held: held.update({Q_PROJ + suffix: make(held[Q_PROJ + suffix])})


def drop(suffix: str):
    return lambda held: held.pop(Q_PROJ + suffix)


def nan_at(position: int):
    def spoil(tensor):
        tensor[position] = float("nan")
        return tensor

    return spoil


# What is done to a 4-bit checkpoint, and what the message must name besides the layer.
DAMAGE_4_BIT = {
    "no nested_absmax": (drop(".weight.nested_absmax"), r"lacks '.*q_proj.weight.nested_absmax'"),
    "no nested_quant_map": (drop(".weight.nested_quant_map"), r"lacks '.*nested_quant_map'"),
    "no absmax": (drop(".weight.absmax"), r"lacks '.*weight.absmax'"),
    "no quant_map": (drop(".weight.quant_map"), r"lacks '.*quant_map'"),
    "no weight": (drop(".weight"), r"lacks '.*q_proj.weight'"),
    "no quant_state": (lambda held: held.pop(STATE), r"model.safetensors: key .*lacks the rest"),
    "weight cut short": (put(".weight", lambda t: t[:100]), r"holds 100 bytes; 64 x 64 4-bit codes take 2048"),
    "weight too long": (put(".weight", lambda t: torch.cat([t, t])), r"holds 4096 bytes"),
    "weight of an integer type": (put(".weight", lambda t: t.int()), r"is I32"),
    "absmax cut short": (put(".weight.absmax", lambda t: t[:-1]), r"is U8 \[63\], expected U8 \[64\]"),
    "absmax as floats": (put(".weight.absmax", lambda t: t.float()), r"is F32 \[64\], expected U8 \[64\]"),
    "quant_map of 15": (put(".weight.quant_map", lambda t: t[:15]), r"is F32 \[15\], expected .*\[16\]"),
    "quant_map of fp4": (put(".weight.quant_map", lambda t: t.flip(0)), r"quant_map'.* is not the nf4 table"),
    "quant_map off by little": (put(".weight.quant_map", lambda t: t + 1e-6), r"is not the nf4 table"),
    "nested_absmax of two": (put(".weight.nested_absmax", lambda t: torch.cat([t, t])), r"is F32 \[2\], expected"),
    "nested_absmax NaN": (put(".weight.nested_absmax", nan_at(0)), r"nested_absmax' holds NaN"),
    "nested_quant_map NaN": (put(".weight.nested_quant_map", nan_at(7)), r"nested_quant_map' holds NaN"),
    "nested_quant_map of 255": (put(".weight.nested_quant_map", lambda t: t[:255]), r"is F32 \[255\]"),
    "JSON cut": (lambda held: held.update({STATE: held[STATE][:40]}), r"bitsandbytes__nf4': not JSON text"),
    "JSON not UTF-8": (lambda held: held[STATE].fill_(255), r"not JSON text"),
    "JSON a list": (lambda held: held.update({STATE: torch.tensor(list(b"[1]"), dtype=torch.uint8)}), r"JSON object"),
    "JSON deeply nested": (
        lambda held: held.update({STATE: torch.tensor(list(b"[" * 60000), dtype=torch.uint8)}),
        r"not JSON text",
    ),
    "JSON as floats": (lambda held: held.update({STATE: held[STATE].float()}), r"expected a short U8 vector"),
    "shape swapped": (lambda held: state(held, shape=[64, 32]), r"64 x 32 4-bit codes take 1024"),
    "shape of three": (lambda held: state(held, shape=[4, 16, 64]), r"shape is \[4, 16, 64\]"),
    "shape negative": (lambda held: state(held, shape=[-64, -64]), r"must be positive"),
    "shape of words": (lambda held: state(held, shape=["64", 64]), r"shape is"),
    "no shape": (lambda held: state(held, shape=None), r"shape is None"),
    "blocksize 100": (lambda held: state(held, blocksize=100), r"blocksize must be one of"),
    "blocksize a list": (lambda held: state(held, blocksize=[64]), r"blocksize"),
    "no blocksize": (lambda held: state(held, blocksize=None), r"blocksize"),
    "quant_type of another": (lambda held: state(held, quant_type="fp4"), r"JSON says quant_type 'fp4'"),
    "nested_blocksize": (lambda held: state(held, nested_blocksize=128), r"nested_blocksize is 128"),
    "offset infinite": (lambda held: state(held, nested_offset=float("inf")), r"nested_offset is inf"),
    "offset NaN": (lambda held: state(held, nested_offset=float("nan")), r"nested_offset is nan"),
    "offset beyond float32": (lambda held: state(held, nested_offset=1e39), r"nested_offset is 1e\+39"),
    "offset a word": (lambda held: state(held, nested_offset="0.1"), r"nested_offset is '0.1'"),
    "no offset": (lambda held: state(held, nested_offset=None), r"nested_offset is None"),
    "unknown quant_type": (
        lambda held: held.update({STATE.replace("nf4", "nf3"): held.pop(STATE)}),
        r"unknown quant_type 'nf3'",
    ),
    "two quant_states": (
        lambda held: held.update({STATE.replace("nf4", "fp4"): torch.tensor(list(b"{}"), dtype=torch.uint8)}),
        r"quant_type",
    ),
    "state of no weight": (
        lambda held: held.update({"x.experts.quant_state.bitsandbytes__nf4": held.pop(STATE)}),
        r"only Linear layers",
    ),
}
DAMAGE_8_BIT = {
    "no SCB": (drop(".SCB"), r"weight_format'.* lacks the rest"),
    "SCB cut short": (put(".SCB", lambda t: t[:-1]), r"is F32 \[63\], expected .*\[64\]"),
    "SCB infinite": (put(".SCB", lambda t: t / 0), r"SCB' holds NaN or infinity"),
    "weight not int8": (put(".weight", lambda t: t.bfloat16()), r"is BF16 \[64, 64\], expected I8"),
    "weight flat": (put(".weight", lambda t: t.reshape(-1)), r"expected two dimensions"),
    "weight_format 2": (put(".weight_format", lambda t: t + 2), r"weight_format'.* is 2; only row-major"),
    "weight_format wide": (put(".weight_format", lambda t: t.int()), r"weight_format'.* is I32"),
}


@pytest.mark.parametrize(
    ("kind", "damage"),
    [("nf4", name) for name in DAMAGE_4_BIT] + [("int8", name) for name in DAMAGE_8_BIT],
)
def test_damaged_source_is_refused(kind, damage, good, tmp_path):
    change, message = (DAMAGE_4_BIT if kind == "nf4" else DAMAGE_8_BIT)[damage]
    src = shutil.copytree(good[kind], tmp_path / "src")
    edit(src, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        pack_checkpoint(src, tmp_path / "packed", progress=False)
    if "experts" not in str(caught.value):
        assert Q_PROJ in str(caught.value) and str(src) in str(caught.value)
    assert not (tmp_path / "packed").exists()


# What is done to a packed checkpoint: to its tensors, and what the message must say.
DAMAGE_PACKED = {
    "no nested_absmax": (drop(".nested_absmax"), r"lacks '.*q_proj.nested_absmax'"),
    "no qweight": (drop(".qweight"), r"lacks '.*q_proj.qweight'"),
    "qweight cut short": (
        put(".qweight", lambda t: t[:-1]),
        r"qweight' is U8 \[3, 1, 512\], expected U8 \[4, 1, 512\]",
    ),
    "absmax_q as floats": (put(".absmax_q", lambda t: t.float()), r"absmax_q' is F32"),
    "offset in 16 bit": (put(".nested_offset", lambda t: t.bfloat16()), r"nested_offset' is BF16 \[\], expected F32"),
    "offset not finite": (
        put(".nested_offset", lambda t: t / 0),
        r"nested_offset' of layer .*q_proj' holds NaN or infinity",
    ),
    "code scaled": (
        put(".code", lambda t: t * 1.1),
        r"model.safetensors: key '.*code' of layer .* is not the nf4 table",
    ),
    "nested_code infinite": (put(".nested_code", lambda t: t * torch.inf), r"nested_code' of layer .* holds NaN"),
    "nested_absmax NaN": (put(".nested_absmax", lambda t: t * torch.nan), r"nested_absmax' of layer .* holds NaN"),
    "surplus statistic": (lambda h: h.update({Q_PROJ + ".scale": torch.ones(64)}), r"q_proj.scale' does not belong"),
    "plain weight beside": (lambda h: h.update({Q_PROJ + ".weight": torch.ones(64, 64)}), r"q_proj.weight' is a plain"),
}


@pytest.mark.parametrize("damage", DAMAGE_PACKED)
def test_damaged_packed_folder_is_refused(damage, good, tmp_path):
    change, message = DAMAGE_PACKED[damage]
    packed = shutil.copytree(good["nf4-packed"], tmp_path / "packed")
    edit(packed, change)
    with pytest.raises(CheckpointError, match=message):
        validate_packed(packed)
    with pytest.raises(CheckpointError, match=message):
        unpack_checkpoint(packed, tmp_path / "back", progress=False)
    assert any(Q_PROJ in problem for problem in describe(packed).problems)
    assert not (tmp_path / "back").exists()


CONFIGS = {
    "future version": (lambda q: q.update(format_version=2), r"format_version is 2; this version of nf4linear reads 1"),
    "version a word": (lambda q: q.update(format_version="1"), r"format_version is '1'"),
    "no version": (lambda q: q.pop("format_version"), r"format_version is None"),
    "unknown format": (lambda q: q["modules"]["default"].update(format="nf3"), r"unknown weight format 'nf3'"),
    "surplus option": (lambda q: q["modules"]["default"].update(group_size=64), r"does not take \['group_size'\]"),
    "other blocksize": (lambda q: q["modules"]["default"].update(blocksize=4096), r"proj.absmax_q' is U8"),
    "no modules": (lambda q: q.update(modules=None), r"modules must map names to formats"),
    "no default": (lambda q: q["modules"].pop("default"), r"no format for layer"),
    "skip list a word": (lambda q: q.update(modules_to_not_convert="lm_head"), r"must be a list of names"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_unreadable_config_is_refused(case, good, tmp_path):
    change, message = CONFIGS[case]
    packed = shutil.copytree(good["nf4-packed"], tmp_path / "packed")
    edit_json(packed / "config.json", lambda config: change(config["quantization_config"]))
    with pytest.raises(CheckpointError, match=message):
        validate_packed(packed)


def test_version_in_the_file_is_checked_too(good, tmp_path):
    from safetensors.torch import save_file

    packed = shutil.copytree(good["nf4-packed"], tmp_path / "packed")
    metadata = {"format": "pt", "nf4linear_format_version": "7"}
    save_file(tensors(packed), packed / "model.safetensors", metadata)
    with pytest.raises(CheckpointError, match=r"model.safetensors: format version '7'"):
        validate_packed(packed)


def test_shapes_of_the_model_are_checked(good):
    with pytest.raises(CheckpointError, match=r"q_proj.qweight' is U8 \[4, 1, 512\], expected U8 \[8, 1, 512\]"):
        validate_packed(good["nf4-packed"], {Q_PROJ: (128, 64)})
    validate_packed(good["nf4-packed"], {Q_PROJ: (64, 64)})


def test_edited_packed_values_do_not_pass_for_the_source(good, tmp_path):
    packed = shutil.copytree(good["nf4-packed"], tmp_path / "packed")
    edit(packed, put(".nested_offset", lambda t: t + 1))
    with pytest.raises(CheckpointError, match=r"nested_offset' of layer .*--synthesize"):
        unpack_checkpoint(packed, tmp_path / "back", progress=False)
    edit(packed, lambda held: held.update({"lm_head.weight": held["lm_head.weight"].half()}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight' is F16 .*it was BF16"):
        unpack_checkpoint(packed, tmp_path / "back", progress=False, force=True)


@pytest.mark.parametrize("seed", range(40))
def test_random_header_damage_never_crashes(seed, good, tmp_path):
    data = bytearray((good["nf4"] / "model.safetensors").read_bytes())
    rng = random.Random(seed)
    for _ in range(3):
        data[rng.randrange(2000)] = rng.choice(b'\x00\xff"[]{}:,019-abX')
    (tmp_path / "model.safetensors").write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    try:
        shards.read_header(tmp_path / "model.safetensors")
    except CheckpointError as error:
        assert str(tmp_path) in str(error)


@pytest.mark.parametrize("seed", range(20))
def test_random_source_record_damage_never_crashes(seed, good, tmp_path):
    packed = shutil.copytree(good["nf4-packed"], tmp_path / "packed")
    text = (packed / "nf4linear_source.json").read_text()
    rng = random.Random(seed)
    at = rng.randrange(len(text))
    broken = text[:at] + rng.choice(['"', "1", "null", "[", "}", "-", "x"]) + text[at + rng.randrange(4) :]
    (packed / "nf4linear_source.json").write_text(broken)
    try:
        unpack_checkpoint(packed, tmp_path / "back", progress=False)
    except CheckpointError:
        assert not (tmp_path / "back").exists()


def test_folders_that_hold_no_checkpoint(good, tmp_path):
    cases = {
        "no config": ({}, r"config.json: cannot be read"),
        "no weights": ({"config.json": "{}"}, r"no model.safetensors"),
        "pickles": (
            {"config.json": "{}", "pytorch_model.bin": "x"},
            r"pytorch_model.bin.*never opened.*save_p",
        ),
        "config not JSON": ({"config.json": "{"}, r"config.json: not valid JSON"),
        "config a list": ({"config.json": "[]"}, r"config.json: expected a JSON object"),
        "index not JSON": ({"config.json": "{}", "model.safetensors.index.json": "x"}, r"not a safetensors index"),
        "index leaves the folder": (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "../x.safetensors"}}'},
            r"plain names inside the folder",
        ),
        "missing shard": (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "x.safetensors"}}'},
            r"names x.safetensors, which is not there",
        ),
    }
    for name, (content, message) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in content.items():
            (folder / file).write_text(text)
        with pytest.raises(CheckpointError, match=message):
            pack_checkpoint(folder, tmp_path / "packed", progress=False)
    with pytest.raises(CheckpointError, match=r"is not a folder; give"):
        pack_checkpoint(tmp_path / "nowhere", tmp_path / "packed", progress=False)
    with pytest.raises(CheckpointError, match="is packed already"):
        pack_checkpoint(good["nf4-packed"], tmp_path / "packed", progress=False)
    gptq = shutil.copytree(good["plain"], tmp_path / "gptq")
    edit_json(gptq / "config.json", lambda config: config.update(quantization_config={"quant_method": "gptq"}))
    with pytest.raises(CheckpointError, match="quantized with 'gptq'"):
        pack_checkpoint(gptq, tmp_path / "packed", progress=False)


def test_options_that_do_not_fit(good, tmp_path):
    def fails(message, src="plain", **options):
        with pytest.raises(ValueError, match=message):
            pack_checkpoint(good[src], tmp_path / "packed", progress=False, **options)
        assert not (tmp_path / "packed").exists()

    fails("packed as it is", "nf4", format="fp4")
    fails("packed as it is", "nf4", skip=["mlp"])
    fails("must be nf4, fp4 or w8_s8", format="int4")
    fails("blocksize must be one of", blocksize=48)
    fails("belong to the 4-bit formats", format="w8_s8", blocksize=64)
    fails("lm_head must be 'w8'", lm_head="nf4")
    fails("a size must look like", max_shard_size="big")
    with pytest.raises(ValueError, match="dequantize must be one of"):
        unpack_checkpoint(good["nf4-packed"], tmp_path / "back", dequantize="int8")


def test_not_finite_weight_is_refused(good, tmp_path):
    src = shutil.copytree(good["plain"], tmp_path / "src")
    edit(src, put(".weight", lambda t: t / 0))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}.weight' of layer .*NaN or infinity"):
        pack_checkpoint(src, tmp_path / "packed", progress=False)


def test_nothing_is_overwritten_without_force(good, tmp_path):
    dst = tmp_path / "packed"
    dst.mkdir()
    pack_checkpoint(good["nf4"], dst, progress=False)  # an empty folder is no loss
    before = files(dst)
    with pytest.raises(CheckpointError, match="--force"):
        pack_checkpoint(good["int8"], dst, progress=False)
    assert files(dst) == before
    pack_checkpoint(good["int8"], dst, progress=False, force=True)
    assert files(dst) == files(good["int8-packed"])
    assert sorted(os.listdir(tmp_path)) == ["packed"]


@pytest.mark.parametrize("file", ["thesis.txt", ".git/config"])
def test_force_replaces_models_only(file, good, tmp_path):
    dst = tmp_path / "dst"
    (dst / file).parent.mkdir(parents=True)
    (dst / file).write_text("years of work")
    if file == ".git/config":
        (dst / "config.json").write_text("{}")
    before = files(dst)
    with pytest.raises(CheckpointError, match="not replaced even with --force"):
        pack_checkpoint(good["nf4"], dst, progress=False, force=True)
    assert files(dst) == before


def test_source_and_destination_must_be_apart(good, tmp_path):
    src = shutil.copytree(good["nf4"], tmp_path / "src")
    link = tmp_path / "link"
    link.symlink_to(src)
    before = files(src)
    for dst in (src, src / "packed", tmp_path, link, link / "packed"):
        with pytest.raises(CheckpointError, match="choose a folder apart"):
            pack_checkpoint(src, dst, progress=False, force=True)
    assert files(src) == before


class _Stop(BaseException):
    """Neither caught nor expected by anything."""


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), _Stop()])
def test_an_interrupted_run_leaves_nothing_finished_and_goes_on(error, good, tmp_path, monkeypatch):
    writes = 0
    write = shard_plan.ShardWriter.write

    def failing(self, key, tensor):
        nonlocal writes
        writes += 1
        if writes == 40:
            raise error
        write(self, key, tensor)

    monkeypatch.setattr(shard_plan.ShardWriter, "write", failing)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="disk is full" if isinstance(error, OSError) else None):
        pack_checkpoint(good["nf4"], tmp_path / "packed", progress=False, max_shard_size="9KB")
    assert not (tmp_path / "packed").exists()
    partial = tmp_path / ".packed.nf4linear-partial"
    with pytest.raises(CheckpointError, match="is an unfinished run"):
        describe(partial)
    finished = {path: path.stat().st_ino for path in partial.glob("*.safetensors")}
    assert finished and not list(partial.glob("*.tmp")) and not (partial / "config.json").exists()
    pack_checkpoint(good["nf4"], tmp_path / "packed", progress=False, max_shard_size="9KB")
    assert all((tmp_path / "packed" / path.name).stat().st_ino == inode for path, inode in finished.items())
    unpack_checkpoint(tmp_path / "packed", tmp_path / "back", progress=False)
    assert files(tmp_path / "back") == files(good["nf4"])
    assert sorted(os.listdir(tmp_path)) == ["back", "packed"]


def test_a_weight_file_has_its_name_only_when_it_is_complete(good, tmp_path, monkeypatch):
    replace = os.replace
    renamed = []

    def spy(old, new):
        if str(new).endswith(".safetensors"):
            assert not Path(new).exists() and shards.read_header(Path(old)).entries
            renamed.append(Path(new).name)
        replace(old, new)

    monkeypatch.setattr(os, "replace", spy)
    pack_checkpoint(good["nf4"], tmp_path / "packed", progress=False, max_shard_size="9KB")
    assert sorted(renamed) == sorted(path.name for path in (tmp_path / "packed").glob("*.safetensors"))


def test_a_changed_run_does_not_go_on_from_an_old_one(good, tmp_path, monkeypatch):
    src = shutil.copytree(good["nf4"], tmp_path / "src")

    def stop(*_):
        raise _Stop

    with monkeypatch.context() as patch:
        patch.setattr(writer.OutputFolder, "_publish", stop)
        with pytest.raises(_Stop):
            pack_checkpoint(src, tmp_path / "packed", progress=False)
    with pytest.raises(CheckpointError, match="other options"):
        pack_checkpoint(src, tmp_path / "packed", progress=False, lm_head="w8")
    edit(src, put(".weight", lambda t: t ^ 1))
    with pytest.raises(CheckpointError, match="unfinished run from another source"):
        pack_checkpoint(src, tmp_path / "packed", progress=False)
    pack_checkpoint(src, tmp_path / "packed", progress=False, force=True)
    unpack_checkpoint(tmp_path / "packed", tmp_path / "back", progress=False)
    assert files(tmp_path / "back") == files(src)


def test_two_runs_into_one_folder_are_kept_apart(tmp_path):
    first, second = (writer.OutputFolder(tmp_path / "packed", {"a": 1}, force=False) for _ in range(2))
    with first.writing(0), pytest.raises(CheckpointError, match="another run is writing"), second.writing(0):
        pass


def test_space_is_checked_before_writing(tmp_path):
    out = writer.OutputFolder(tmp_path / "packed", {}, force=False)
    with pytest.raises(CheckpointError, match="are to be written"), out.writing(1 << 60):
        pass


KILLED = """
    import os, signal, sys
    from nf4linear.checkpoint import pack_checkpoint, shard_plan, writer

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_after(owner, name, count):
        original = getattr(owner, name)
        def counted(*args, **kwargs):
            nonlocal count
            count -= 1
            kill() if count == 0 else None
            return original(*args, **kwargs)
        setattr(owner, name, counted)

    src, dst, where, count = sys.argv[1:]
    owner = {"write": shard_plan.ShardWriter, "replace": os, "copyfile": writer.shutil}[where]
    kill_after(owner, where, int(count))
    pack_checkpoint(src, dst, max_shard_size="9KB", progress=False, force=True)
"""


@pytest.mark.parametrize(
    ("where", "count"),
    [("write", 50), ("replace", 5), ("copyfile", 1), ("replace", -2), ("replace", -1)],
    ids=lambda value: str(value),
)
def test_sigkill_at_any_moment_loses_nothing(where, count, good, tmp_path):
    """Negative counts are the last renames: the old folder away, the new one in its place."""
    dst = tmp_path / "packed"
    pack_checkpoint(good["int8"], dst, progress=False)
    old = files(dst)
    if count < 0:
        renames = _count_renames(good["nf4"], tmp_path / "counted")
        count = renames + 2 + count  # replacing an older folder takes one rename more
    script = textwrap.dedent(KILLED)
    run = subprocess.run(
        [sys.executable, "-c", script, good["nf4"], dst, where, str(count)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    moved = tmp_path / ".packed.nf4linear-replaced"
    assert files(dst if dst.exists() else moved) == old, "the old folder is whole until the new one is"
    pack_checkpoint(good["nf4"], dst, max_shard_size="9KB", progress=False, force=True)
    unpack_checkpoint(dst, tmp_path / "back", progress=False)
    assert files(tmp_path / "back") == files(good["nf4"])
    assert {name for name in os.listdir(tmp_path) if name.startswith(".")} == set()


def _count_renames(src: Path, dst: Path) -> int:
    replace, count = os.replace, 0

    def counted(*args):
        nonlocal count
        count += 1
        replace(*args)

    os.replace = counted
    try:
        pack_checkpoint(src, dst, max_shard_size="9KB", progress=False)
    finally:
        os.replace = replace
    return count


# ---- what happens around a run ---------------------------------------------------------------------------------------


def test_what_was_put_in_the_place_meanwhile_is_not_replaced(good, tmp_path, monkeypatch):
    """Nothing is overwritten without --force, whenever it came there."""
    destination = tmp_path / "packed"
    original = writer.OutputFolder.has

    def has(self, name):
        destination.mkdir()
        (destination / "thesis.txt").write_text("all of it")
        return original(self, name)

    monkeypatch.setattr(writer.OutputFolder, "has", has)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        pack_checkpoint(good["nf4"], destination, progress=False)
    assert files(destination) == {"thesis.txt": b"all of it"}


def test_a_run_that_wrote_nothing_does_not_bind_the_next(good, tmp_path, monkeypatch):
    """As after too little space: other options may be tried at once."""
    with monkeypatch.context() as context:
        context.setattr(
            writer.OutputFolder, "_check_space", lambda *_: (_ for _ in ()).throw(CheckpointError("no space"))
        )
        with pytest.raises(CheckpointError, match="no space"):
            pack_checkpoint(good["nf4"], tmp_path / "packed", progress=False)
    pack_checkpoint(good["nf4"], tmp_path / "packed", max_shard_size="1MB", progress=False)


RECORD_FAULTS = {
    "a tensor less": (lambda tensors, i: tensors.pop(i), "lists no key"),
    "a narrower dtype": (lambda tensors, i: tensors[i].__setitem__(1, "F16"), "cannot have been F16"),
    "another kind of dtype": (lambda tensors, i: tensors[i].__setitem__(1, "I8"), "cannot have been I8"),
    "another shape": (lambda tensors, i: tensors[i].__setitem__(2, [1, *tensors[i][2]]), "cannot have been F32"),
}


@pytest.mark.parametrize("fault", RECORD_FAULTS)
def test_unpack_does_not_believe_a_damaged_record(fault, good, tmp_path):
    """What it writes as byte for byte the source would not be that."""
    change, words = RECORD_FAULTS[fault]
    pack_checkpoint(good["nf4"], tmp_path / "packed", progress=False)

    def damage(record):
        tensors = record["files"][0]["tensors"]
        change(tensors, next(i for i, (key, _, _) in enumerate(tensors) if key.endswith(".weight.quant_map")))

    edit_json(tmp_path / "packed" / "nf4linear_source.json", damage)
    with pytest.raises(CheckpointError, match=words):
        unpack_checkpoint(tmp_path / "packed", tmp_path / "back", progress=False)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("names", [3, [1.5], "Llama", None])
def test_architectures_that_are_no_names(names, good, tmp_path):
    folder = Path(shutil.copytree(good["nf4"], tmp_path / "source"))
    edit_json(folder / "config.json", lambda config: config.update(architectures=names))
    assert describe(folder).architecture


def test_a_head_that_cannot_be_untied_is_refused(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="always ties its output head"):
        pack_checkpoint(tiny("t5"), tmp_path / "packed", lm_head="w8", progress=False)

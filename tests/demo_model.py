"""The demo model for tests: fixtures (conftest.py makes them known), loaded variants, logits."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from nf4linear import pack_checkpoint
from nf4linear.cli.loading import ModelSource

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "examples" / "data" / "alice.txt"
LAYERS = 210  # linear layers of SmolLM2-135M outside its tied head


@pytest.fixture(scope="session")
def demo_folders():
    """(16-bit, bitsandbytes) folders below demo/, built on first use; fails where the model's file cannot be found."""
    sys.path.insert(0, str(ROOT / "tools"))
    from make_demo_model import make_demo_model

    try:
        return make_demo_model(ROOT / "demo")
    except FileNotFoundError as error:
        pytest.fail(f"{error}; `make test` does this by itself", pytrace=False)


@pytest.fixture(scope="session")
def demo_packed(demo_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack_checkpoint(demo_folders[1], folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def demo_tokens(demo_folders):
    tokenizer = AutoTokenizer.from_pretrained(demo_folders[0])
    return tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0, :1200]


def load(folder, variant, dtype="auto", device="cpu", **options):
    return ModelSource(str(folder), device=device, dtype=dtype, **options).load(variant)


@torch.inference_mode()
def logits(model, token_ids):
    """float32 [64, vocabulary] on the CPU, of a passage from the middle of the text."""
    return model(token_ids[None, 1000:1064].to(model.device)).logits[0].float().cpu()


def relative_error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()

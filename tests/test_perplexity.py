"""Sliding-window perplexity against a plain definition of it, and its standard error against the truth."""

import math
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from nf4linear.cli import perplexity as command
from nf4linear.perplexity import Perplexity, mean_and_error, perplexity, windows


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    # Random weights of the usual size predict nothing; larger ones make every context count.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("tokens", "window", "stride"), [(150, 32, 8), (150, 32, 31), (33, 32, 5), (20, 32, 8), (2, 2, 1)]
)
def test_every_token_but_the_first_is_scored_once(tokens, window, stride):
    scored = []
    for begin, end, scored_from in windows(tokens, window, stride):
        assert end - begin <= window
        assert begin < scored_from < end  # a scored token has its predecessor inside the window
        assert begin == 0 or scored_from - begin >= window - stride
        scored += range(scored_from, end)
    assert scored == list(range(1, tokens))


@pytest.mark.parametrize(("window", "stride"), [(32, 8), (32, 31), (64, 32)])
@torch.inference_mode()
def test_losses_are_those_of_each_token_with_its_context(model, token_ids, window, stride):
    result = perplexity(model, token_ids, window=window, stride=stride)
    expected = torch.empty(149)
    for begin, end, scored_from in windows(150, window, stride):
        for position in range(scored_from, end):
            logits = model(token_ids[None, begin:position]).logits[0, -1]
            expected[position - 1] = -logits.log_softmax(-1)[token_ids[position]]
    torch.testing.assert_close(result.losses, expected, rtol=1e-4, atol=1e-4)
    assert result.perplexity == pytest.approx(expected.double().mean().exp().item(), rel=1e-5)


def test_a_model_that_computes_all_logits_scores_the_same(model, token_ids, monkeypatch):
    result = perplexity(model, token_ids, window=32, stride=8)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, use_cache: forward(input_ids, use_cache=use_cache))
    torch.testing.assert_close(perplexity(model, token_ids, window=32, stride=8).losses, result.losses)


def test_progress_adds_up_to_the_scored_tokens(model, token_ids):
    steps = []
    perplexity(model, token_ids, window=32, stride=8, progress=steps.append)
    assert sum(steps) == 149 and len(steps) > 10


def test_standard_error_covers_correlated_losses():
    # An AR(1) series: the true standard error of its mean is 1 / (1 - 0.8) / sqrt(T), three times that of
    # independent losses of the same variance.
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(10_000, generator=generator)
    losses = noise.clone()
    for i in range(1, losses.numel()):
        losses[i] = 0.8 * losses[i - 1] + noise[i]
    truth = 1 / (1 - 0.8) / 100
    assert mean_and_error(losses)[1] == pytest.approx(truth, rel=0.2)


def test_perplexity_and_error_follow_the_losses():
    losses = torch.tensor([1.0, 3.0, 2.0, 2.0] * 25)
    score = Perplexity(losses, 32, 16, seconds=2.0)
    assert score.perplexity == pytest.approx(math.exp(2))
    assert score.standard_error == pytest.approx(math.exp(2) * mean_and_error(losses)[1])
    assert score.tokens_per_second == 50
    worse = Perplexity(losses + 0.01, 32, 16, seconds=1.0)
    change, error = worse.relative_to(score)
    assert change == pytest.approx(math.expm1(0.01), rel=1e-4)
    assert error < 1e-6  # paired: the same shift everywhere is certain


def test_errors_name_the_numbers(model, token_ids):
    with pytest.raises(ValueError, match="window 8, stride 8"):
        perplexity(model, token_ids, window=8, stride=8)
    with pytest.raises(ValueError, match="1 tokens"):
        perplexity(model, token_ids[:1], window=32, stride=8)
    with pytest.raises(ValueError, match=r"window is 65 tokens.*64 positions"):
        perplexity(model, token_ids, window=65)
    score = Perplexity(torch.zeros(5), 2, 1, 1.0)
    with pytest.raises(ValueError, match="5 tokens here and 6"):
        score.relative_to(Perplexity(torch.zeros(6), 2, 1, 1.0))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--window", "2000"], "window is 2000 tokens"),
        (["--window", "16", "--stride", "16"], "window 16, stride 16"),
        (["--window", "16", "--json", "no/such/folder/x.json"], "no folder no/such/folder; make it first"),
        (["--window", "16"], "at least 2 are needed"),
    ],
)
def test_the_command_looks_at_its_arguments_before_it_loads(tiny_packed, tmp_path, monkeypatch, arguments, text):
    source = command.ModelSource
    monkeypatch.setattr(source, "load", lambda *_: pytest.fail("loaded a model"))
    monkeypatch.setattr(source, "tokenizer", lambda _: lambda text, **_: SimpleNamespace(input_ids=torch.ones(1, 1)))
    (tmp_path / "text").write_text("a")
    app = typer.Typer()
    app.command()(command.perplexity)
    done = CliRunner().invoke(app, [str(tiny_packed()), "--text", str(tmp_path / "text"), *arguments])
    assert done.exit_code == 1 and text in done.output

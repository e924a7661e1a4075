"""Exact match, against answers that are known."""

import io

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from tra import Decoder, DecoderConfig
from tra.evaluation import evaluate, evaluate_all, score
from tra.recipes import RECIPES, Evaluation
from tra.tasks import Batch, FlipFlop

SMALL = DecoderConfig(vocabulary=6, layers=1, heads=2, width=16)


class Scripted(Decoder):
    """Predicts the tokens it is given, whatever it reads."""

    def __init__(self, predictions: Tensor) -> None:
        super().__init__(SMALL)
        self.predictions, self.position = predictions, 0

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        end = self.position + tokens.shape[1]
        wanted = self.predictions[:, self.position : end]
        self.position = end
        return nn.functional.one_hot(wanted, 6).float() * 9.0


def flip_flop(examples: int, length: int) -> Batch:
    return FlipFlop().sample(torch.Generator().manual_seed(5), examples, length)


@pytest.mark.parametrize("length", [64, 1024, 1026])
def test_exact_match_counts_sequences_without_a_single_error(length: int) -> None:
    batch = flip_flop(10, length)
    right = batch.tokens[:, 1:].clone()
    assert score(Scripted(right), [batch])["exact_match"] == 1.0

    noise = torch.where(batch.counted[:, 1:], right, (right + 1) % 6)
    scored = score(Scripted(noise), [batch])
    assert scored["exact_match"] == scored["token_accuracy"] == 1.0  # tokens that do not count do not count

    wrong = right.clone()
    for row in (2, 7):
        last = batch.counted[row, 1:].nonzero()[-1]
        wrong[row, last] = (wrong[row, last] + 1) % 6
    scored = score(Scripted(wrong), [batch])
    assert scored["exact_match"] == 0.8
    assert scored["token_accuracy"] == pytest.approx(1 - 2 / int(batch.counted.sum()))


def test_loss_is_the_mean_cross_entropy_of_counted_tokens() -> None:
    batch = flip_flop(6, 64)
    scored = score(Scripted(batch.tokens[:, 1:]), [batch])
    expected = -torch.tensor([9.0, 0, 0, 0, 0, 0]).log_softmax(0)[0].item()
    assert scored["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("attention", ["tra", "rope"])
def test_reading_piece_by_piece_equals_reading_at_once(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(DecoderConfig(vocabulary=6, layers=2, heads=2, width=16, attention=attention))
    wanted = Evaluation("iid", 96, 12)
    whole = evaluate(model, FlipFlop(), wanted)
    monkeypatch.setattr("tra.evaluation.TOKENS_PER_PIECE", 17)
    pieces = evaluate(model, FlipFlop(), wanted)
    assert whole["exact_match"] == pieces["exact_match"]
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert model.training


def test_prints_a_line_for_each_length() -> None:
    recipe = RECIPES["flip-flop-small"]()
    console = Console(record=True, width=100, file=io.StringIO())
    sets = [Evaluation(name, length, 2) for length in (8, 16) for name in ("iid", "sparse")]
    results = evaluate_all(Decoder(recipe.model), recipe, sets, console)
    lines = [line for line in console.export_text().splitlines() if " tokens:" in line]
    assert len(results) == 4
    assert len(lines) == 2
    assert "tra at      8 tokens:  iid" in lines[0]

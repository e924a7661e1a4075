"""Exact match, against answers that are known, and which sets of a run are measured."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tra.runs.evaluation
from tests.runs.tiny import TINY
from tra import Decoder, DecoderConfig
from tra.progress import shown
from tra.runs import Run, evaluate, train
from tra.runs.evaluation import measure, measure_all, predict
from tra.tasks import Batch, Evaluation, ExactMatch, FlipFlop

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


def scored_by(model: Decoder, batch: Batch) -> ExactMatch:
    return ExactMatch.of(Evaluation("iid", batch.tokens.shape[1], len(batch)), predict(model, [batch]))


@pytest.mark.parametrize("length", [64, 1024, 1026])
def test_exact_match_counts_sequences_without_a_single_error(length: int) -> None:
    batch = flip_flop(10, length)
    right = batch.tokens[:, 1:].clone()
    assert scored_by(Scripted(right), batch).exact_match == 1.0

    noise = torch.where(batch.counted[:, 1:], right, (right + 1) % 6)
    scored = scored_by(Scripted(noise), batch)
    assert scored.exact_match == scored.token_accuracy == 1.0  # tokens that do not count do not count

    wrong = right.clone()
    for row in (2, 7):
        last = batch.counted[row, 1:].nonzero()[-1]
        wrong[row, last] = (wrong[row, last] + 1) % 6
    scored = scored_by(Scripted(wrong), batch)
    assert scored.exact_match == 0.8
    assert scored.token_accuracy == pytest.approx(1 - 2 / int(batch.counted.sum()))


def test_loss_is_the_mean_cross_entropy_of_counted_tokens() -> None:
    batch = flip_flop(6, 64)
    scored = scored_by(Scripted(batch.tokens[:, 1:]), batch)
    expected = -torch.tensor([9.0, 0, 0, 0, 0, 0]).log_softmax(0)[0].item()
    assert scored.loss == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("attention", ["tra", "rope"])
def test_reading_piece_by_piece_equals_reading_at_once(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(DecoderConfig(vocabulary=6, layers=2, heads=2, width=16, attention=attention))
    wanted = Evaluation("iid", 96, 12)
    whole = measure(model, FlipFlop(), wanted)
    monkeypatch.setattr("tra.runs.evaluation.TOKENS_PER_PIECE", 17)
    pieces = measure(model, FlipFlop(), wanted)
    assert whole.exact_match == pieces.exact_match
    if attention == "tra":  # the same bits
        assert pieces == whole
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-5)
    assert model.training


def test_prints_a_line_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    sets = [Evaluation(name, length, 2) for length in (8, 16) for name in ("iid", "sparse")]
    model = Decoder(SMALL)
    assert len(measure_all(model, FlipFlop(), sets, "tra")) == 4
    assert capsys.readouterr().out == ""
    with shown():
        measure_all(model, FlipFlop(), sets, "tra")
    lines = [line for line in capsys.readouterr().out.splitlines() if " tokens, exact match:" in line]
    assert len(lines) == 2
    assert re.fullmatch(r"   tra at      8 tokens, exact match:  iid [01]\.\d{3}  sparse [01]\.\d{3}", lines[0])


RECIPE = replace(
    TINY,
    model=SMALL,
    steps=1,
    evaluations=(Evaluation("iid", 16, 7), Evaluation("sparse", 16, 5), Evaluation("iid", 24, 3)),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Not to be written to."""
    return train(RECIPE, tmp_path_factory.mktemp("evaluated") / "run")


def test_a_run_is_measured_on_its_recipes_sets_by_default(run: Run) -> None:
    found = evaluate(run)
    assert found == run.results
    assert found == evaluate(run.folder) == evaluate(str(run.folder))


@pytest.mark.parametrize(
    "asked, expected",
    [
        ({"lengths": (16,)}, [("iid", 16, 7), ("sparse", 16, 5)]),
        ({"sets": ("sparse",)}, [("sparse", 16, 5), ("sparse", 24, 100)]),
        ({"sets": ("dense",), "lengths": (8, 16)}, [("dense", 8, 100), ("dense", 16, 100)]),
        ({"examples": 2}, [("iid", 16, 2), ("sparse", 16, 2), ("iid", 24, 2), ("sparse", 24, 2)]),
    ],
)
def test_what_is_asked_for_takes_the_place_of_what_the_recipe_says(
    asked: dict[str, Any], expected: list[tuple[str, int, int]], run: Run
) -> None:
    before = (run.folder / "results.json").read_bytes()
    found = evaluate(run, **asked)
    assert [(result.set, result.length, result.examples) for result in found] == expected
    assert (run.folder / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"sets": ("spars",)}, "evaluation set must be one of dense, iid, sparse, got 'spars'; did you mean 'sparse'"),
        ({"lengths": (7,)}, "length must be an even number of tokens, at least 4, got 7"),
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"stride": 4}, "stride must be None for flip_flop, which is no text, got 4"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    asked: dict[str, Any], message: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tra.runs.evaluation, "measure", None)
    with pytest.raises(ValueError, match=message):
        evaluate(run, **asked)


def test_a_recipe_without_sets_must_be_asked_for_some(tmp_path: Path) -> None:
    train(replace(RECIPE, evaluations=()), tmp_path)
    assert [result.length for result in evaluate(tmp_path, sets=("iid",), lengths=(8,))] == [8]
    with pytest.raises(ValueError, match=f"sets and lengths must be given: the recipe of {tmp_path} names none"):
        evaluate(tmp_path, sets=("iid",))


def test_the_published_copy_is_measured_in_place_of_the_tasks_sets(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    batch = flip_flop(11, 20)
    texts = [FlipFlop().text(row) for row in batch.tokens]
    for name in ("val", "val_sparse"):
        datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / f"{name}-0.parquet")
    found = evaluate(run, data=tmp_path)
    assert [(result.set, result.length, result.examples) for result in found] == [("iid", 20, 11), ("sparse", 20, 11)]
    assert found[0].loss == pytest.approx(scored_by(run.model, batch).loss, rel=1e-5)
    with pytest.raises(ValueError, match=r"data must be a folder with val_dense-\*.parquet files, found none"):
        evaluate(run, sets=("dense",), data=tmp_path)

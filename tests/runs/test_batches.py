"""The batch of a step depends on the recipe and the step alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runs.tiny import TINY, checkpoints
from tra.recipes import Recipe
from tra.runs import train
from tra.runs.batches import training_batches
from tra.tasks import Batch, FlipFlop


def batches_of(recipe: Recipe) -> Callable[[int], Batch]:
    return training_batches(recipe, recipe.build_task())


def test_one_pass_over_a_fixed_set_uses_every_sequence_once() -> None:
    recipe = replace(TINY, data="fixed", examples=40, steps=10, length=64)
    batch_of_step = batches_of(recipe)
    first = torch.cat([batch_of_step(step).tokens for step in range(5)])
    second = torch.cat([batch_of_step(step).tokens for step in range(5, 10)])
    assert len(first.unique(dim=0)) == 40
    assert torch.equal(first.unique(dim=0), second.unique(dim=0))
    assert not torch.equal(first, second)
    again = batches_of(recipe)
    assert torch.equal(again(7).tokens, batch_of_step(7).tokens)


def test_trains_on_the_published_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rng = torch.Generator().manual_seed(0)
    texts = [FlipFlop().text(row) for row in FlipFlop().sample(rng, 24, 16).tokens]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "train-0.parquet")
    recipe = replace(TINY, data=str(tmp_path), steps=3)
    train(recipe, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [3]
    with pytest.raises(ValueError, match="length must be that of the data, 16, got 32"):
        batches_of(replace(recipe, length=32))
    with pytest.raises(ValueError, match="batch must be at most the 24 sequences of the data, got 32"):
        batches_of(replace(recipe, batch=32))


def test_fresh_samples_differ_between_steps_and_seeds() -> None:
    batch_of_step = batches_of(TINY)
    assert not torch.equal(batch_of_step(0).tokens, batch_of_step(1).tokens)
    assert not torch.equal(batch_of_step(0).tokens, batches_of(replace(TINY, seed=1))(0).tokens)

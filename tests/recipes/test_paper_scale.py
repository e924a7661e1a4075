"""The recipes of the paper's scale run: real steps of the real models at the real lengths, with few sequences."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tra.experiments.table1 import PAPER
from tra.model import Decoder
from tra.recipes import build_recipe
from tra.runs import train
from tra.runs.step import summed_loss
from tra.tasks import Batch


@pytest.mark.parametrize("column", PAPER)
def test_a_synthetic_recipe_trains_and_is_measured(column: str, tmp_path: Path) -> None:
    recipe = PAPER[column]()
    longest = max(recipe.evaluations, key=lambda entry: entry.length)
    few = replace(
        recipe,
        steps=2,
        batch=2,
        examples=None if recipe.examples is None else 4,
        log_every=1,
        evaluations=(replace(longest, examples=1),),
    )
    run = train(few, tmp_path / "run")
    assert [math.isfinite(entry["loss"]) for entry in run.metrics()] == [True, True]
    assert run.results[0].length == longest.length


def test_the_language_model_takes_steps() -> None:
    """Without the text, which needs the hub: the medium model with its vocabulary on random tokens."""
    recipe = build_recipe("wikitext103")
    torch.manual_seed(0)
    model = Decoder(recipe.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate)
    tokens = torch.randint(recipe.model.vocabulary, (1, recipe.length + 1))
    losses = []
    for _ in range(2):
        loss = summed_loss(model, Batch(tokens, torch.ones_like(tokens, dtype=torch.bool)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / recipe.length)
    assert losses[0] == pytest.approx(math.log(recipe.model.vocabulary), rel=0.05), "it knows nothing yet"
    assert losses[1] < losses[0]

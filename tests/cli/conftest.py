from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.cli.calling import without_plugins
from tra.recipes import RECIPES, Evaluation, Recipe, RecipeOf
from tra.runs import train

SETS = ("iid", "sparse", "dense")
WHOLE = RECIPES["flip-flop-small"]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with without_plugins():
        yield


@cache
def tiny(attention: str = "tra") -> Recipe:
    """The small recipe, cut down to a second, under its own name."""
    whole = WHOLE(attention)
    return replace(
        whole,
        steps=4,
        batch=4,
        length=16,
        model=replace(whole.model, layers=1, heads=2, width=16),
        evaluations=tuple(Evaluation(name, length, 4) for length in (16, 32) for name in SETS),
    )


@pytest.fixture
def tiny_recipe(monkeypatch: pytest.MonkeyPatch) -> RecipeOf:
    """What flip-flop-small is for the test."""
    monkeypatch.setitem(RECIPES, "flip-flop-small", tiny)
    return tiny


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on a task, which no test may change."""
    return train(tiny(), tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture(scope="session")
def exported(language_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text as a folder for transformers, which no test may change."""
    from tra.hub.export import export

    folder = tmp_path_factory.mktemp("exported") / "model"
    export(language_run, folder)
    return folder

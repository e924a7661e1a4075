"""Each recipe against the published numbers: those of the paper, and those that the stored tables were made with."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tra.recipes.rates import SMALL, UNTUNED, small_rate

from tra.attention import MECHANISMS
from tra.model import sized
from tra.recipes import Recipe, build_recipe

STORED = Path(__file__).parents[2] / "docs" / "results"

RECIPE_OF_COLUMN = {"flip_flop": "flip-flop-narrow", "wikitext103": "wikitext103-small"}


def stored(name: str) -> dict[str, Any]:
    return json.loads((STORED / name / "results.json").read_text())


def recipe_of(column: str) -> str:
    return RECIPE_OF_COLUMN.get(column, f"{column.replace('_', '-')}-small")


@pytest.mark.parametrize("name", ["table1", "figure1", "figure2"])
def test_a_recipe_has_the_learning_rate_that_the_table_was_made_with(name: str) -> None:
    """For each mechanism: no other place knows a better one."""
    rates = {(row["column"], row["attention"]): row["learning_rate"] for row in stored(name)["results"]}
    assert len({attention for _, attention in rates}) > 1
    for (column, attention), rate in rates.items():
        assert build_recipe(recipe_of(column), attention).learning_rate == rate, (column, attention)


@pytest.mark.parametrize("name", ["table1", "figure2"])
def test_the_small_recipes_are_those_of_the_stored_tables(name: str) -> None:
    for column, content in stored(name)["recipes"].items():
        assert Recipe.from_json(json.dumps(content)) == build_recipe(recipe_of(column))


def test_every_mechanism_has_a_learning_rate_of_its_own_at_the_small_scale() -> None:
    assert set(SMALL) == set(MECHANISMS)
    assert {name: small_rate(name) for name in MECHANISMS} == SMALL
    assert small_rate("somebody's own") == UNTUNED
    assert build_recipe("induct-once-small", "differential").learning_rate == 4e-3
    assert build_recipe("flip-flop-narrow", "stick-breaking").learning_rate == 2e-3


def test_the_learning_rates_have_the_lowest_loss_of_the_stored_grid() -> None:
    """Over its seeds, at the training length."""
    losses: dict[str, dict[float, list[float]]] = {}
    for row in stored("tuning")["results"]:
        if row["length"] == 8:
            losses.setdefault(row["attention"], {}).setdefault(float(row["column"]), []).append(row["loss"])
    assert set(losses) == set(SMALL)
    for attention, by_rate in losses.items():
        assert small_rate(attention) == min(by_rate, key=lambda rate: sum(by_rate[rate]))


def test_the_papers_language_model_has_the_papers_numbers() -> None:
    recipe = build_recipe("wikitext103")
    assert (recipe.model.layers, recipe.model.heads, recipe.model.width) == (8, 8, 512)
    assert recipe.model.vocabulary == 50257
    assert recipe.model == sized("medium")
    assert (recipe.length, recipe.batch, recipe.steps) == (128, 64, 100_000)
    assert recipe.task_options == {"train": "wikitext-103", "tokenizer": "gpt2"}
    windows = [128, 256, 512, 1024, 2048, 4096]
    assert [entry.length for entry in recipe.evaluations if entry.stride is None] == windows
    assert [entry.length for entry in recipe.evaluations if entry.stride == 128] == windows
    assert {(entry.name, entry.examples) for entry in recipe.evaluations} == {("test", None)}
    assert (recipe.seed, recipe.precision, recipe.data) == (0, "no", "fresh")


def test_the_small_language_model_trains_on_one_text_and_is_measured_on_the_other() -> None:
    recipe = build_recipe("wikitext103-small")
    assert recipe.task_options == {
        "train": "wikitext-2",
        "evaluation": "wikitext-103",
        "tokenizer": f"bpe-{recipe.model.vocabulary}",
    }
    assert {entry.name for entry in recipe.evaluations} == {"valid"}
    assert any(entry.stride for entry in recipe.evaluations)


def test_the_papers_flip_flop_has_the_papers_numbers() -> None:
    recipe = build_recipe("flip-flop")
    assert recipe.model == sized("mini")
    assert (recipe.length, recipe.batch * recipe.steps, recipe.examples, recipe.data) == (512, 1.6e6, 1.6e6, "fixed")
    assert [asdict(entry) for entry in recipe.evaluations] == [
        {"name": name, "length": 512, "examples": examples, "stride": None}
        for name, examples in (("iid", 16_000), ("sparse", 160_000), ("dense", 4_000))
    ]


@pytest.mark.parametrize("task", ["copy-unique", "copy-repeat", "induct-once", "induct-recent", "instructed"])
def test_the_papers_strings_have_the_papers_numbers(task: str) -> None:
    recipe = build_recipe(task)
    assert recipe.model == replace(sized("mini"), vocabulary=600)
    assert (recipe.length, recipe.batch * recipe.steps) == (50, 4_000_000)
    longest = [50, 100, 200, 300, 400, 500] if task == "instructed" else [50, 100, 150, 200, 250, 300]
    assert list(dict.fromkeys(entry.length for entry in recipe.evaluations)) == longest
    assert {entry.examples for entry in recipe.evaluations} == {1000}
    assert {entry.name for entry in recipe.evaluations} == set(recipe.build_task().evaluation_sets())

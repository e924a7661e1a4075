"""Each recipe against the published numbers: those of the paper, and those that the stored tables were made with."""

from dataclasses import asdict, replace

import pytest

from tra.model import sized
from tra.recipes import build_recipe


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
    assert (recipe.length, recipe.batch, recipe.steps) == (512, 64, 20_000)
    assert (recipe.examples, recipe.data, recipe.warmup) == (1_600_000, "fixed", 0.05)
    assert [asdict(entry) for entry in recipe.evaluations] == [
        {"name": name, "length": 512, "examples": examples, "stride": None}
        for name, examples in (("iid", 16_000), ("sparse", 160_000), ("dense", 4_000))
    ]


@pytest.mark.parametrize("task", ["copy-unique", "copy-repeat", "induct-once", "induct-recent", "instructed"])
def test_the_papers_strings_have_the_papers_numbers(task: str) -> None:
    recipe = build_recipe(task)
    assert recipe.model == replace(sized("mini"), vocabulary=600)
    assert (recipe.length, recipe.batch, recipe.steps) == (50, 128, 100_000)
    longest = [50, 100, 200, 300, 400, 500] if task == "instructed" else [50, 100, 150, 200, 250, 300]
    assert list(dict.fromkeys(entry.length for entry in recipe.evaluations)) == longest
    assert {entry.examples for entry in recipe.evaluations} == {1000}
    assert {entry.name for entry in recipe.evaluations} == set(recipe.build_task().evaluation_sets())

"""A recipe says a run completely, refuses what makes no sense, and comes back from what was stored of it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tra.attention import MECHANISMS
from tra.errors import RunError
from tra.model import DecoderConfig
from tra.recipes import RECIPES, Evaluation, Recipe, build_recipe
from tra.recipes.strings import OTHERS

NEWER = [f"{task.replace('_', '-')}-small" for task in OTHERS]
"""Recipes that version 0.1 did not have."""
STORED = Path(__file__).parents[1] / "version_01.json"

TINY = Recipe(
    name="tiny",
    model=DecoderConfig(vocabulary=44, layers=1, heads=2, width=16),
    task="copy_unique",
    task_options={"alphabet": 40},
    length=8,
    steps=3,
    batch=2,
    learning_rate=1e-3,
    evaluations=(Evaluation("copy", 8, 4), Evaluation("copy", 24, 5)),
)


def in_version_01(recipe: Recipe, **changes: Any) -> str:
    """As version 0.1 wrote it: text, alphabet and QK-norm had fields of their own."""
    stored = json.loads(recipe.to_json())
    options = stored.pop("task_options")
    del stored["plugins"]
    stored["text"] = {"evaluation": None, **options} if recipe.task == "text" else None
    stored["alphabet"] = options.get("alphabet")
    stored["model"]["qk_norm"] = stored["model"].pop("attention_options").get("qk_norm", True)
    return json.dumps({**stored, **changes})


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_called_what_it_is_found_by(name: str) -> None:
    assert build_recipe(name).name == name
    assert RECIPES[name]().model.attention == "tra"


@pytest.mark.parametrize("name", RECIPES)
def test_every_mechanism_has_every_recipe_and_differs_in_nothing_but_the_learning_rate(name: str) -> None:
    usual = build_recipe(name)
    for attention in MECHANISMS:
        recipe = build_recipe(name, attention)
        assert recipe.model.attention == attention
        assert set(recipe.differences(usual)) <= {"model.attention", "learning_rate"}


def test_no_two_recipes_mechanisms_or_seeds_share_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recipe, "__post_init__", lambda recipe: None)  # names need no checks, which take their time
    names = [
        replace(build_recipe(name, attention), seed=seed).folder_name()
        for name, attention, seed in itertools.product(RECIPES, MECHANISMS, (0, 1, 11))
    ]
    assert len(set(names)) == len(names)
    assert {character for name in names for character in name} <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert build_recipe("copy-unique").folder_name() == "copy-unique-tra-0"
    assert build_recipe("copy-unique-small").folder_name() == "copy-unique-small-tra-0"


def test_no_name_leads_out_of_the_folder_of_runs() -> None:
    for name in ("../../x", "/tmp/x", "a/b", ".."):
        folder = replace(build_recipe("flip-flop-small"), name=name).folder_name()
        assert (Path("runs") / folder).resolve().parent == Path("runs").resolve()


def test_another_option_is_another_folder() -> None:
    rope = build_recipe("flip-flop-small", "rope")
    other = rope.changed({"model.attention_options": {"theta": 10_000}})
    assert other.folder_name() == "flip-flop-small-rope-theta=10000-0" != rope.folder_name()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_back_from_json(name: str) -> None:
    recipe = build_recipe(name, "rope").changed({"model.attention_options": {"theta": 10_000}, "seed": 7})
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert again.name == name
    assert again.differences(recipe) == {}


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in NEWER])
def test_what_version_01_stored_is_the_same_recipe(name: str) -> None:
    recipe = build_recipe(name, "rope")
    assert Recipe.from_json(in_version_01(recipe)) == recipe
    without = recipe.changed({"model.attention_options": {"qk_norm": False}})
    assert Recipe.from_json(in_version_01(without)) == without


def stored_by_version_01() -> list[dict[str, Any]]:
    return list(json.loads(STORED.read_text())["recipes"].values())


def test_the_recipes_behind_the_published_results_are_read() -> None:
    recipes = stored_by_version_01()
    assert {stored["task"] for stored in recipes} >= {"flip_flop", "copy_unique", "induct_once", "instructed", "text"}
    for stored in recipes:
        recipe = Recipe.from_json(json.dumps(stored))
        assert recipe.task_options.get("alphabet") == stored.get("alphabet")
        assert recipe.model.width == stored["model"]["width"]
        assert recipe.model.attention_options == {}
        assert [entry.length for entry in recipe.evaluations] == [entry["length"] for entry in stored["evaluations"]]
        assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_recipe_of_a_field_that_nobody_knows_is_refused() -> None:
    stored = {**json.loads(TINY.to_json()), "momentum": 0.9}
    with pytest.raises(TypeError, match="momentum"):
        Recipe.from_json(json.dumps(stored))


def test_a_missing_plug_in_is_named() -> None:
    stored = {**json.loads(TINY.to_json()), "plugins": ["my_lab.tasks"]}
    with pytest.raises(RunError, match=r"the plug-in my_lab\.tasks is needed and not loaded"):
        Recipe.from_json(json.dumps(stored))
    assert json.loads(TINY.to_json())["plugins"] == []


def test_changes_reach_the_recipe_and_its_model() -> None:
    changed = TINY.changed({"steps": 9, "model.width": 32, "model.attention": "rope", "task_options": {"alphabet": 30}})
    assert (changed.steps, changed.model.width, changed.model.attention, changed.task_options) == (
        *(9, 32, "rope"),
        {"alphabet": 30},
    )
    assert changed.batch == TINY.batch
    assert TINY.changed({}) == TINY


def test_single_options_are_changed_beside_the_others() -> None:
    rotary = TINY.changed({"model.attention": "rope", "model.attention_options": {"qk_norm": False}})
    changed = rotary.changed({"model.attention_options.theta": 100.0, "task_options.mixed": False})
    assert changed.model.label == "rope qk_norm=False theta=100"
    assert changed.task_options == {**TINY.task_options, "mixed": False}
    with pytest.raises(ValueError, match="got 'alphabt'; did you mean 'alphabet'"):
        TINY.changed({"task_options.alphabt": 3})


@pytest.mark.parametrize(
    "name, near",
    [("step", "steps"), ("model.widht", "model.width"), ("learning-rate", "learning_rate"), ("width", "model.width")],
)
def test_a_change_of_what_is_no_field_is_refused(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"a field of a recipe must be among .*, got '{name}'; did you mean '{near}'"):
        TINY.changed({name: 1})


def test_differences_name_the_fields_and_both_values() -> None:
    other = TINY.changed({"steps": 9, "model.width": 32, "task_options": {"alphabet": 30}})
    assert TINY.differences(other) == {
        "steps": (3, 9),
        "model.width": (16, 32),
        "task_options": ({"alphabet": 40}, {"alphabet": 30}),
    }
    assert other.differences(TINY)["steps"] == (9, 3)
    assert TINY.differences(replace(TINY, name="another name")) == {}
    assert replace(TINY, name="another name") == TINY


def test_a_run_of_another_length_is_measured_at_as_many_times_it() -> None:
    longer = TINY.adjusted({"length": 12})
    assert longer.evaluations == (Evaluation("copy", 12, 4), Evaluation("copy", 36, 5))
    assert longer.length == 12


def test_own_text_with_another_length_is_measured_from_that_length_on() -> None:
    usual = build_recipe("wikitext103-small")
    own = usual.adjusted({"length": 32, "task_options": {"train": "nowhere", "tokenizer": "bpe-300"}})
    measured = own.evaluations
    assert min(entry.length for entry in measured) == 32
    assert [entry.length for entry in measured] == [entry.length // 4 for entry in usual.evaluations]
    assert {entry.length * entry.examples for entry in measured} == {1 << 17}
    assert [entry.stride for entry in measured if entry.stride] == [16, 128]


def test_the_caller_cannot_change_a_recipes_options_afterwards() -> None:
    options = {"alphabet": 40}
    recipe = replace(TINY, task_options=options)
    options["alphabet"] = 3
    assert recipe.task_options == {"alphabet": 40}
    assert hash(recipe) == hash(TINY)


@pytest.mark.parametrize(
    "changes, message",
    [
        *(
            ({name: 0}, f"{name} must be at least 1, got 0")
            for name in ("length", "steps", "batch", "accumulate", "log_every", "checkpoint_every", "keep_checkpoints")
        ),
        ({"steps": 10**30}, "steps must be at most 99,999,999, got 1,000,"),
        ({"batch": 10**30}, "batch must be at most 99,999,999, got 1,000,"),
        ({"length": 10**12}, "length must be at most 16,777,216, got 1,000,000,000,000"),
        ({"steps": "2"}, "steps must be a whole number, got '2'"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"examples": 2.5}, "examples must be a whole number or None, got 2.5"),
        ({"warmup": 1.5}, r"warmup must be a share of the steps in \[0, 1\], got 1.5"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), got 1.0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
        ({"learning_rate": "1e-3"}, "learning_rate must be a finite number, got '1e-3'"),
        ({"precision": "fp8"}, "precision must be 'no' or 'bf16', got 'fp8'"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"evaluations": (("iid", 16, 3),)}, "evaluations must each be an Evaluation"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number, got nan"),
        ({"clip": 0.0}, "clip must be positive, got 0.0"),
        ({"data": "fixed"}, "examples must be at least the batch of 2 for fixed data, got None"),
        ({"data": "fixed", "examples": 1}, "examples must be at least the batch of 2 for fixed data, got 1"),
        ({"task": "copy_uniq"}, "task must be one of .* did you mean 'copy_unique'"),
        ({"length": 41}, "length must be at most the alphabet of 40"),
        ({"model.vocabulary": 43}, "model.vocabulary must be at least 44 for copy_unique, got 43"),
        ({"evaluations": (Evaluation("iid", 8, 4),)}, "evaluation set must be one of copy, got 'iid'"),
        ({"evaluations": (Evaluation("copy", 99, 4),)}, "length must be at most the alphabet of 40"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TINY.changed(changes)


def test_a_misspelt_recipe_or_mechanism_is_named() -> None:
    with pytest.raises(ValueError, match=r"recipe must be one of .*, got 'flipflop-small'; did you mean 'flip-flop-sm"):
        build_recipe("flipflop-small")
    with pytest.raises(ValueError, match=r"attention must be one of .*, got 'ropee'; did you mean 'rope'"):
        build_recipe("flip-flop-small", "ropee")

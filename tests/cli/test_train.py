"""`tra train`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cli.calling import Captured, fails, help_of, shows
from tra.recipes import RECIPES, Recipe, RecipeOf, build_recipe
from tra.runs import Run, load_run, train


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Recipe:
    """The recipe that a command would train."""
    given: list[Recipe] = []
    monkeypatch.setattr("tra.runs.train", lambda recipe, folder, **_: given.append(recipe))
    shows(["train", *arguments], capsys)
    (recipe,) = given
    return recipe


def test_a_run_is_trained_measured_and_stored(tiny_recipe: RecipeOf, capsys: Captured) -> None:
    shown = shows(["train", "flip-flop-small", "--seed", "3", "--model.attention", "rope"], capsys)
    assert shown.splitlines()[-1] == "runs/flip-flop-small-rope-3"
    run = load_run("runs/flip-flop-small-rope-3")
    assert run.recipe == replace(tiny_recipe("rope"), seed=3)
    assert [(result.set, result.length) for result in run.results][:2] == [("iid", 16), ("sparse", 16)]
    assert [entry["step"] for entry in run.metrics()] == [4]


def test_help_names_every_recipe(capsys: Captured) -> None:
    shown = help_of(["train"], capsys)
    for name in RECIPES:
        assert f" {name} " in shown
    assert "--model.options" in shown


def test_help_of_a_recipe_shows_what_it_says(capsys: Captured) -> None:
    shown = help_of(["train", "copy-unique-small"], capsys)
    assert "--learning-rate FLOAT (default: 0.001)" in shown
    assert "alphabet=40" in shown
    assert "--model.options is short for --model.attention-options" in shown


@pytest.mark.parametrize("attention", ["tra", "rope", "differential"])
def test_a_mechanism_is_trained_as_the_recipe_says_for_it(
    attention: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for arguments in (["--model.attention", attention], [f"--model.attention={attention}"]):
        recipe = recipe_of(["copy-unique-small", *arguments], monkeypatch, capsys)
        assert recipe == build_recipe("copy-unique-small", attention)
    changed = recipe_of(["copy-unique-small", *arguments, "--learning-rate", "0.5"], monkeypatch, capsys)
    assert changed.learning_rate == 0.5


@pytest.mark.parametrize("option", ["--model.options", "--model.attention-options"])
@pytest.mark.parametrize("words", ["theta=10000 qk_norm=false", "theta=1e4,qk_norm=false"])
def test_options_of_the_mechanism(option: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    arguments = ["copy-unique-small", "--model.attention", "rope", option, *words.split()]
    recipe = recipe_of(arguments, monkeypatch, capsys)
    assert recipe.model.attention_options == {"qk_norm": False, "theta": 10000.0}
    assert recipe.learning_rate == build_recipe("copy-unique-small", "rope").learning_rate
    assert recipe.folder_name() == "copy-unique-small-rope-qk_norm=False-theta=10000-0"


def test_options_of_the_task_go_over_those_of_the_recipe(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    usual = build_recipe("copy-unique-small")
    recipe = recipe_of(["copy-unique-small", "--task-options", "mixed=false"], monkeypatch, capsys)
    assert recipe == replace(usual, task_options={"alphabet": 40, "mixed": False})
    arguments = ["copy-unique-small", "--task-options", "alphabet=30", "--length", "5"]
    recipe = recipe_of(arguments, monkeypatch, capsys)
    assert recipe.task_options == {"alphabet": 30}
    assert [entry.length for entry in recipe.evaluations] == [5, 10, 15, 20], "as many times the training length"
    wider = ["copy-unique-small", "--task-options", "alphabet=200", "--model.vocabulary", "204"]
    assert recipe_of(wider, monkeypatch, capsys).task_options == {"alphabet": 200}


def test_options_of_the_recipes_own_mechanism_are_kept(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def make(attention: str = "rope") -> Recipe:
        usual = build_recipe("copy-unique-small", attention)
        return replace(usual, model=replace(usual.model, attention_options={"theta": 100.0}))

    monkeypatch.setitem(RECIPES, "low", make)
    recipe = recipe_of(["low", "--model.options", "qk_norm=false"], monkeypatch, capsys)
    assert recipe.model.attention_options == {"qk_norm": False, "theta": 100.0}


def test_options_given_several_times_and_in_several_spellings_are_all_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    words = ["copy-unique-small", "--task-options", "alphabet=36", "--steps", "3", "--task_options=mixed=false"]
    recipe = recipe_of(words, monkeypatch, capsys)
    assert recipe.task_options == {"alphabet": 36, "mixed": False}


def test_a_recipe_is_checked_once_as_it_is_and_once_as_it_is_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    checked: list[int] = []
    check = Recipe.__post_init__
    monkeypatch.setattr(Recipe, "__post_init__", lambda recipe: (checked.append(recipe.steps), check(recipe))[1])
    recipe_of(["copy-unique-small", "--steps", "7"], monkeypatch, capsys)
    assert checked == [1500, 7]


def test_from_python_a_folder_is_refused_as_the_command_refuses_it(finished_run: Path, tiny_recipe: RecipeOf) -> None:
    before = sorted(finished_run.rglob("*"))
    recipe = load_run(finished_run).recipe
    with pytest.raises(ValueError, match="holds this run, finished: measure it"):
        train(recipe, finished_run, resume=False)
    with pytest.raises(ValueError, match="finished after 4 steps: it cannot be extended"):
        train(replace(recipe, steps=9), finished_run, resume=False)
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"holds a run of another recipe, with other values of batch \(4, now 8\)"):
            train(replace(recipe, batch=8), finished_run, resume=resume)
    assert train(recipe, finished_run).results == load_run(finished_run).results
    assert sorted(finished_run.rglob("*")) == before


def test_another_task_keeps_the_options_that_it_has(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    recipe = recipe_of(["copy-unique-small", "--task", "copy_repeat"], monkeypatch, capsys)
    assert (recipe.task, recipe.task_options) == ("copy_repeat", {"alphabet": 40})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("flipflop", "got 'flipflop'; did you mean 'flip-flop'?"),
        ("flip-flop-small --steps 0", "steps must be at least 1, got 0"),
        ("flip-flop-small --steps x", "--steps must be a whole number, got 'x'"),
        ("flip-flop-small --length 63", "length must be an even number of tokens, at least 4, got 63"),
        ("flip-flop-small --task flipflop", "got 'flipflop'; did you mean 'flip_flop'?"),
        ("flip-flop-small --data /nowhere", "data must be a folder with train-*.parquet files"),
        ("flip-flop-small --precision fp8", "--precision must be 'no' or 'bf16', got 'fp8'"),
        ("flip-flop-small --model.attention rop", "did you mean 'rope'?"),
        ("flip-flop-small --model.options thta=3 --model.attention rope", "got 'thta'; did you mean 'theta'?"),
        ("flip-flop-small --model.options theta=3", "attention_options of tra must be among qk_norm, "),
        ("flip-flop-small --model.options theta", "--model.attention-options must be NAME=VALUE, got 'theta'"),
        (
            "flip-flop-small --model.options qk_norm=3",
            "qk_norm in attention_options of tra must be True or False, got 3",
        ),
        ("copy-unique-small --task-options alphabt=3", "got 'alphabt'; did you mean 'alphabet'?"),
        (
            "copy-unique-small --task-options alphabet=x",
            "alphabet in task_options of copy_unique must be a whole number",
        ),
        (
            "copy-unique-small --task-options alphabet=199",
            "model.vocabulary must be at least 203 for copy_unique, got 44",
        ),
        ("flip-flop-small --stepps 3", "--stepps is no option of tra train; did you mean --steps?"),
        ("flip-flop-small --lr 3", "--lr is no option of tra train; did you mean --learning-rate?"),
        ("flip-flop-small --track nothing", "track must be one of "),
        ("flip-flop-small twice", "does not expect 'twice' here"),
        ("", "or --resume RUN must be given; recipes: flip-flop, flip-flop-small, "),
        ("--steps 3", "RECIPE or --resume RUN must be given"),
        ("flip-flop-small --resume nowhere", "RECIPE must not be given with --resume"),
        ("--resume=nowhere", "run must be a folder that holds recipe.json, got nowhere"),
        ("--resume nowhere", "run must be a folder that holds recipe.json, got nowhere"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_two(arguments: str, message: str, capsys: Captured) -> None:
    assert message in fails(["train", *arguments.split()], capsys)
    assert not list(Path().rglob("recipe.json"))


def test_a_folder_with_another_recipe_says_which_fields_differ(
    finished_run: Path, tiny_recipe: RecipeOf, capsys: Captured
) -> None:
    arguments = ["train", "flip-flop-small", "--output", str(finished_run)]
    before = sorted(finished_run.rglob("*"))
    error = fails([*arguments, "--batch", "8", "--model.width", "32", "--task-options", "ignore=0.5"], capsys)
    assert error.startswith(f"folder {finished_run} holds a run of another recipe, with other values of ")
    assert "batch (4, now 8)" in error
    assert "model.width (16, now 32)" in error
    assert "task_options ({}, now {'ignore': 0.5})" in error
    assert "learning_rate" not in error
    assert sorted(finished_run.rglob("*")) == before


def test_a_finished_run_is_not_extended(finished_run: Path, tiny_recipe: RecipeOf, capsys: Captured) -> None:
    arguments = ["train", "flip-flop-small", "--output", str(finished_run)]
    error = fails([*arguments, "--steps", "9"], capsys)
    assert error.startswith(f"folder {finished_run} holds this run, finished after 4 steps: it cannot be extended")
    assert error.endswith("train for 9 steps in another folder, with --output")
    error = fails(arguments, capsys)
    assert error == f"folder {finished_run} holds this run, finished: measure it by tra evaluate {finished_run}"
    assert shows(["train", "--resume", str(finished_run)], capsys).splitlines()[-1] == str(finished_run)


def begun(recipe: Recipe, folder: Path) -> Run:
    folder.mkdir()
    (folder / "recipe.json").write_text(recipe.to_json())
    return Run(folder)


def test_an_unfinished_run_goes_on_with_resume_alone(tiny_recipe: RecipeOf, tmp_path: Path, capsys: Captured) -> None:
    run = begun(tiny_recipe(), tmp_path / "run")
    error = fails(["train", "flip-flop-small", "--output", str(run.folder)], capsys)
    assert error.endswith(f"already holds this run: go on with it by tra train --resume {run.folder}")
    for option in (["--batch", "9"], ["--seed=3"], ["--model.attention-options", "qk_norm=false"], ["--output", "x"]):
        error = fails(["train", "--resume", str(run.folder), *option], capsys)
        name = option[0].split("=")[0]
        assert error.startswith(f"{name} must not be given with --resume: a run goes on as it began")
    assert run.steps_done() == 0
    spaced = begun(tiny_recipe(), tmp_path / "my run")
    error = fails(["train", "flip-flop-small", "--output", str(spaced.folder)], capsys)
    assert error.endswith(f"go on with it by tra train --resume '{spaced.folder}'")
    assert shows(["train", f"--resume={run.folder}"], capsys).splitlines()[-1] == str(run.folder)
    assert run.steps_done() == 4
    assert json.loads((run.folder / "results.json").read_text())["step"] == 4


def test_a_stopped_run_says_how_it_goes_on(
    tiny_recipe: RecipeOf, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    from tra.cli import main
    from tra.errors import Interrupted

    def stop(*_: object, **__: object) -> None:
        raise Interrupted("stopped after 2 of 4 steps and saved a checkpoint")

    monkeypatch.setattr("tra.runs.train", stop)
    assert main(["train", "flip-flop-small", "--output", "mine", "--plugin", "json"]) == 130
    assert capsys.readouterr().err == (
        "tra: stopped after 2 of 4 steps and saved a checkpoint; go on with: tra train --resume mine --plugin json\n"
    )
    assert main(["train", "flip-flop-small", "--output", "my $run"]) == 130
    assert capsys.readouterr().err.endswith("go on with: tra train --resume 'my $run'\n")


def test_a_folders_name_shows_what_differs_from_the_recipe(tiny_recipe: RecipeOf, capsys: Captured) -> None:
    words = ["flip-flop-small", "--no-measure", "--steps", "2", "--model.width", "8", "--task-options", "ignore=0.5"]
    assert shows(["train", *words], capsys).splitlines()[-1] == "runs/flip-flop-small-tra-steps=2-ignore=0.5-width=8-0"
    assert load_run("runs/flip-flop-small-tra-steps=2-ignore=0.5-width=8-0").recipe.steps == 2


def test_a_folders_name_can_always_be_written() -> None:
    usual = build_recipe("flip-flop-small")
    name = replace(usual, init_from="runs/" + "a/b c" * 99, seed=3).folder_name(usual)
    assert len(name) <= 160
    assert name.endswith("-3")
    assert "/" not in name
    assert " " not in name
    assert name != replace(usual, init_from="runs/" + "a/b d" * 99, seed=3).folder_name(usual)


def test_a_run_is_extended_by_its_steps(tiny_recipe: RecipeOf, capsys: Captured) -> None:
    shows(["train", "flip-flop-small", "--schedule", "constant", "--output", "run", "--no-measure"], capsys)
    error = fails(["train", "flip-flop-small", "--schedule=constant", "--steps", "6", "--output", "run"], capsys)
    assert error == "folder run holds this run with 4 steps: extend it by tra train --resume run --steps 6"
    shows(["train", "--resume", "run", "--steps", "6", "--no-measure"], capsys)
    assert (load_run("run").step, load_run("run").recipe.steps) == (6, 6)
    shows(["train", "flip-flop-small", "--output", "cosine", "--no-measure"], capsys)
    error = fails(["train", "--resume", "cosine", "--steps", "6"], capsys)
    assert error.startswith("schedule must be 'constant' or 'wsd' for a run to be extended: with 'cosine'")


def test_a_quick_trial_is_not_measured(
    tiny_recipe: RecipeOf, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("tra.runs.training.measure_all", lambda *_: pytest.fail("measured"))
    shown = shows(["train", "flip-flop-small", "--no-measure", "--output", "run"], capsys)
    assert shown.splitlines()[-2:] == ["not measured; tra evaluate run does it", "run"]


def test_validation_and_early_stopping_are_options(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    words = "--validate-every 50 --validation iid sparse@256:8 --watch exact_match --patience 3 --init-from some/run"
    recipe = recipe_of(["flip-flop-small", *words.split()], monkeypatch, capsys)
    assert (recipe.validate_every, recipe.watch, recipe.patience) == (50, "exact_match", 3)
    assert recipe.validation == ("iid", "sparse@256:8")
    assert recipe.init_from == "some/run"


def test_threads_are_those_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    before = torch.get_num_threads()
    try:
        recipe_of(["flip-flop-small", "--threads", str(before + 1)], monkeypatch, capsys)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert "threads must be between 1 and 4,096, got 0" in fails(["train", "flip-flop-small", "--threads=0"], capsys)

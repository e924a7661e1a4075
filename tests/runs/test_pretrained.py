"""The small trained models that come with the package: what they are, and that any command reads them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs.tiny import TINY
from tra.cli import main
from tra.runs import evaluate, load_run, train
from tra.runs.folder import PRETRAINED, PRETRAINED_FOLDER, pretrained_runs

NAMES = list(pretrained_runs())


def test_there_are_two() -> None:
    assert NAMES == ["flip-flop", "text"]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_small_in_bfloat16_with_recipe_and_card(name: str) -> None:
    run = load_run(PRETRAINED + name)
    (weights,) = run.folder.rglob("model.safetensors")
    assert weights.stat().st_size < 2_000_000
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
    assert run.step == run.recipe.steps == run.measured().step
    card = (run.folder / "README.md").read_text()
    assert f"Made by `python examples/pretrained.py {name}`" in card
    assert '"learning_rate"' in card
    assert not run.model.training


def test_flip_flop_makes_no_error_at_16_times_its_training_length() -> None:
    results = evaluate(f"{PRETRAINED}flip-flop", sets=["iid", "sparse", "dense"], lengths=[1024], examples=8)
    assert [result.value for result in results] == [1.0, 1.0, 1.0]


def test_what_was_measured_is_what_the_rounded_weights_score() -> None:
    run = load_run(f"{PRETRAINED}flip-flop")
    stored = next(result for result in run.results if (result.set, result.length) == ("iid", 64))
    (again,) = evaluate(run, sets=["iid"], lengths=[64], examples=64)
    assert again.value == stored.value == 1.0


def test_text_is_generated_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"{PRETRAINED}text", "--prompt", "The river", "--tokens", "8", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["new_tokens"] == 8
    assert len(last["text"]) > 8


def test_a_model_is_looked_at_elsewhere_than_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(PRETRAINED_FOLDER.rglob("*"))
    assert main(["inspect", f"{PRETRAINED}flip-flop", "--length", "12", "--html"]) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown == "runs/pretrained-flip-flop/inspection/explorer.html"
    assert Path(shown).exists()
    assert main(["evaluate", f"{PRETRAINED}flip-flop", "--lengths", "64", "--examples", "4"]) == 0
    assert sorted(PRETRAINED_FOLDER.rglob("*")) == before


def test_training_begins_with_one_and_never_writes_to_it(tmp_path: Path) -> None:
    source = load_run(f"{PRETRAINED}flip-flop")
    recipe = replace(TINY, model=source.recipe.model, steps=1, init_from=f"{PRETRAINED}flip-flop")
    train(recipe, tmp_path / "run", measure=False)
    first = load_run(f"{tmp_path / 'run'}@0").model.state_dict()
    assert all(torch.equal(first[name], tensor) for name, tensor in source.model.state_dict().items())
    with pytest.raises(ValueError, match="begin with its weights by --init-from"):
        train(source.recipe, source.folder)


def test_a_misspelt_name_is_named() -> None:
    with pytest.raises(ValueError, match=r"pretrained must be one of flip-flop, text, got 'flipflop'; did you mean"):
        load_run(f"{PRETRAINED}flipflop")

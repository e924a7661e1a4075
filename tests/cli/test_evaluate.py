"""`tra evaluate`."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cli.calling import Captured, fails, json_of, shows
from tests.cli.conftest import tiny
from tra.cli import main
from tra.model import Decoder
from tra.recipes import RecipeOf
from tra.runs import load_run, train
from tra.runs.evaluation import measure
from tra.tasks import Evaluation, FlipFlop


@pytest.fixture(scope="module")
def finished_rope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny("rope"), tmp_path_factory.mktemp("finished") / "rope").folder


def test_the_recipes_sets_are_measured_again_and_stored(finished_run: Path, tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    stored = tmp_path / "run" / "results.json"
    measured = json.loads(stored.read_text())["results"]
    stored.unlink()
    found = json_of(["evaluate", str(tmp_path / "run")], capsys)
    assert found["step"] == 4
    assert found["results"] == measured == json.loads(stored.read_text())["results"]


@pytest.mark.parametrize("words", ["8 6", "8,6"])
def test_other_sets_and_lengths_are_measured_and_not_stored(words: str, finished_run: Path, capsys: Captured) -> None:
    before = (finished_run / "results.json").read_bytes()
    arguments = ["evaluate", str(finished_run), "--lengths", *words.split(), "--sets", "dense", "--examples", "3"]
    found = json_of(arguments, capsys)["results"]
    assert [(entry["set"], entry["length"], entry["examples"]) for entry in found] == [("dense", 8, 3), ("dense", 6, 3)]
    assert (finished_run / "results.json").read_bytes() == before


def test_the_table_has_an_interval_for_every_figure_and_the_number_of_sequences(
    finished_run: Path, capsys: Captured
) -> None:
    shown = shows(["evaluate", str(finished_run), "--lengths", "8", "16", "--examples", "7"], capsys)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    assert rows[0] == ["attention", "set", "8", "16"]
    assert [row[:2] for row in rows[2:5]] == [["tra", "iid"], ["tra", "sparse"], ["tra", "dense"]]
    for row in rows[2:5]:
        for cell in row[2:]:
            found = re.fullmatch(r"(\d\.\d{3}) \[(\d\.\d{3}), (\d\.\d{3})\]", cell)
            assert found is not None
            value, low, high = map(float, found.groups())
            assert 0 <= low <= value <= high <= 1
            assert low < high
    assert rows[5] == ["test sequences", "all sets", "21", "21"]


def test_a_text_has_a_table_for_every_figure(language_run: Path, capsys: Captured) -> None:
    shown = shows(["evaluate", str(language_run), "--lengths", "16", "--examples", "25"], capsys)
    for title in ("Perplexity per token", "Perplexity per word", "Perplexity per byte"):
        assert f"## {title}, valid, " in shown
    assert len(re.findall(r"^\| tra \| [\d.]+ \[[\d.]+, [\d.]+\] \|$", shown, flags=re.MULTILINE)) == 3
    assert len(re.findall(r"^\| test sequences \| \d+ \|$", shown, flags=re.MULTILINE)) == 3


def test_the_published_copy_is_measured(
    finished_run: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [FlipFlop().text(row) for row in FlipFlop().sample(torch.Generator().manual_seed(0), 7, 24).tokens]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "val_dense-0.parquet")
    (result,) = json_of(["evaluate", str(finished_run), "--data", str(tmp_path), "--sets", "dense"], capsys)["results"]
    assert (result["set"], result["length"], result["examples"]) == ("dense", 24, 7)


def test_an_unfinished_run_is_measured_and_says_so(
    finished_run: Path, tiny_recipe: RecipeOf, tmp_path: Path, capsys: Captured
) -> None:
    recipe = tiny_recipe()
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    assert "has no intact checkpoint yet" in fails(["evaluate", str(tmp_path)], capsys, code=1)
    train(replace(recipe, steps=2), tmp_path / "half")
    (tmp_path / "half" / "recipe.json").write_text(recipe.to_json())
    assert main(["evaluate", str(tmp_path / "half"), "--json"]) == 0
    assert "the run is at step 2 of 4" in capsys.readouterr().err
    stored = json.loads((tmp_path / "half" / "results.json").read_text())
    assert (stored["step"], stored["steps"], stored["task_version"]) == (2, 4, 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--examples 0", "examples must be at least 1, got 0"),
        ("--examples many", "--examples must be a whole number or None, got 'many'"),
        ("--sets iid dens", "got 'dens'; did you mean 'dense'?"),
        ("--sets iid,dens", "got 'dens'; did you mean 'dense'?"),
        ("--lengths 8 x", "--lengths must be a whole number, got 'x'"),
        ("--lengths 7", "length must be an even number of tokens"),
        ("--stride 3 --lengths 8", "stride must be None for flip_flop, which is no text, got 3"),
        ("--data /nowhere", "data must be a folder"),
        ("--exampels 3", "--exampels is no option of tra evaluate; did you mean --examples?"),
    ],
)
def test_a_wrong_argument_is_one_line_and_stores_nothing(
    arguments: str, message: str, finished_run: Path, capsys: Captured
) -> None:
    before = (finished_run / "results.json").read_bytes()
    assert message in fails(["evaluate", str(finished_run), *arguments.split()], capsys)
    assert (finished_run / "results.json").read_bytes() == before


def test_what_is_no_recipe_is_said(tmp_path: Path, capsys: Captured) -> None:
    assert fails(["evaluate", "nowhere"], capsys) == "run must be a folder that holds recipe.json, got nowhere"
    (tmp_path / "recipe.json").write_text('{"name": "x"}')
    assert "is not a recipe that this version can read" in fails(["evaluate", str(tmp_path)], capsys)


def test_a_run_can_be_measured_under_other_options_of_its_mechanism(
    finished_rope: Path, finished_run: Path, capsys: Captured
) -> None:
    """YaRN for longer sequences: what a decoder with these options and the same weights makes of them."""
    before = (finished_rope / "results.json").read_bytes()
    arguments = ["evaluate", str(finished_rope), "--sets", "iid", "--lengths", "64", "--examples", "5"]
    usual = json_of(arguments, capsys)["results"][0]
    given = ["--options", "scaling=yarn", "factor=8", "trained_length=8"]
    scaled = json_of([*arguments, *given], capsys)["results"][0]
    assert scaled["loss"] != usual["loss"]
    run = load_run(finished_rope)
    options = {"scaling": "yarn", "factor": 8.0, "trained_length": 8}
    other = Decoder(replace(run.recipe.model, attention_options=options)).eval()
    other.load_state_dict(run.model.state_dict())
    assert measure(other, FlipFlop(), Evaluation("iid", 64, 5)).loss == pytest.approx(scaled["loss"])
    assert "| rope scaling=yarn factor=8 trained_length=8 | iid |" in shows([*arguments, *given], capsys)
    assert (finished_rope / "results.json").read_bytes() == before
    wrong = fails(["evaluate", str(finished_run), "--options", "factor=8"], capsys)
    assert wrong.startswith("attention_options of tra must be among")

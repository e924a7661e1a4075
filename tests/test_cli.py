"""The commands as a user meets them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tra.attention import Cache
from tra.bench import new_token
from tra.cli import main
from tra.model import sized
from tra.recipes import RECIPES, Evaluation, Recipe
from tra.tasks import FlipFlop
from tra.training import train


@pytest.fixture
def tiny_recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The small recipe, cut down to seconds, under its own name."""
    whole = RECIPES["flip-flop-small"]()
    recipe = replace(
        whole,
        steps=4,
        batch=4,
        length=16,
        model=replace(whole.model, layers=1, heads=2, width=16),
        evaluations=tuple(Evaluation(name, length, 4) for length in (16, 32) for name in ("iid", "sparse", "dense")),
    )
    monkeypatch.setitem(RECIPES, "flip-flop-small", lambda: recipe)
    return recipe


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    try:
        assert main(arguments) == code
    except SystemExit as stop:
        assert stop.code == code
    return capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ("demo", "train", "evaluate", "reproduce", "bench", "list"))


@pytest.mark.parametrize(
    "command", ["demo", "train flip-flop-small", "train", "evaluate", "reproduce", "bench", "list"]
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([*command.split(), "--help"]) == 0
    except SystemExit as stop:
        assert stop.code == 0
    assert "usage: tra" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "inspect, list, reproduce, train, got 'trian'; did you mean 'train'?"),
        (["train", "flipflop"], "got 'flipflop'; did you mean 'flip-flop'?"),
        (["train", "flip-flop-small", "--steps", "0"], "steps must be at least 1, got 0"),
        (["train", "flip-flop-small", "--length", "63"], "length must be an even number of tokens, at least 4, got 63"),
        (["train", "flip-flop-small", "--task", "flipflop"], "got 'flipflop'; did you mean 'flip_flop'?"),
        (["train", "flip-flop-small", "--data", "/nowhere"], "data must be a folder with train-*.parquet files"),
        (["train", "flip-flop-small", "--model.attention", "rop"], "did you mean 'rope'?"),
        (["train", "flip-flop-small", "--stepps", "3"], "--steps"),
        (["train"], "recipe or --resume RUN must be given; recipes: flip-flop, flip-flop-small, wikitext103"),
        (["train", "--resume=nowhere"], "run must be a folder that holds recipe.json, got nowhere"),
        (["demo", "--attention"], "attention must name at least one mechanism"),
        (["bench", "--seconds", "0"], "seconds must be positive, got 0.0"),
        (["train", "--resume", "nowhere"], "run must be a folder that holds recipe.json, got nowhere"),
        (["evaluate", "nowhere"], "run must be a folder that holds recipe.json, got nowhere"),
        (["demo", "--attention", "tro"], "attention must be one of alibi, cope, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_argument_exits_with_two_and_says_what_was_expected(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = fails(arguments, capsys)
    assert message in " ".join(error.replace("│", " ").split())
    assert "Traceback" not in error


def test_list_shows_everything_there_is_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed["recipes"]) == set(RECIPES)
    assert {"tra", "rope"} <= set(listed["attention"])
    assert set(listed["sizes"]) == {"mini", "medium"}
    assert "flip_flop" in listed["tasks"]
    assert main(["list"]) == 0
    assert "flip-flop-small" in capsys.readouterr().out


def test_train_then_evaluate(
    tiny_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "flip-flop-small", "--seed", "3", "--model.attention", "rope"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "runs/flip-flop-small-rope-3"
    run = tmp_path / "runs" / "flip-flop-small-rope-3"
    stored = Recipe.from_json((run / "recipe.json").read_text())
    assert stored == replace(tiny_recipe, seed=3, model=replace(tiny_recipe.model, attention="rope"))
    measured = json.loads((run / "results.json").read_text())["results"]
    assert [(entry["set"], entry["length"]) for entry in measured][:2] == [("iid", 16), ("sparse", 16)]

    assert main(["evaluate", str(run), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["results"]
    assert again == measured

    before = (run / "results.json").read_bytes()
    assert main(["evaluate", str(run), "--lengths", "8", "--sets", "dense", "--examples", "3", "--json"]) == 0
    (other,) = json.loads(capsys.readouterr().out)["results"]
    assert (other["set"], other["length"], other["examples"]) == ("dense", 8, 3)
    assert (run / "results.json").read_bytes() == before
    assert "examples must be at least 1, got 0" in fails(["evaluate", str(run), "--examples", "0"], capsys)
    assert "evaluation set must be one of" in fails(["evaluate", str(run), "--sets", "iid", "dens"], capsys)
    assert (run / "results.json").read_bytes() == before

    same = ["train", "flip-flop-small", "--seed", "3", "--model.attention", "rope"]
    assert "already holds a run" in fails(same, capsys)


def test_evaluates_on_the_published_copy(
    tiny_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [FlipFlop().text(row) for row in FlipFlop().sample(torch.Generator().manual_seed(0), 7, 24).tokens]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "val_dense-0.parquet")
    assert main(["train", "flip-flop-small", "--output", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path), "--sets", "dense", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["set"], result["length"], result["examples"]) == ("dense", 24, 7)


def test_evaluating_an_unfinished_run_says_so(
    tiny_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.json").write_text(tiny_recipe.to_json())
    assert "has no intact checkpoint yet" in fails(["evaluate", str(tmp_path)], capsys, code=1)
    train(replace(tiny_recipe, steps=2), tmp_path / "half", console=Console(quiet=True))
    (tmp_path / "half" / "recipe.json").write_text(tiny_recipe.to_json())
    assert main(["evaluate", str(tmp_path / "half"), "--json"]) == 0
    assert "the run is at step 2 of 4" in capsys.readouterr().err
    stored = json.loads((tmp_path / "half" / "results.json").read_text())
    assert (stored["step"], stored["steps"], stored["task_version"]) == (2, 4, 1)
    (tmp_path / "recipe.json").write_text('{"name": "x"}')
    assert "is not a recipe that this version can read" in fails(["evaluate", str(tmp_path)], capsys)


def test_demo_writes_everything_and_prints_its_folder_last(
    tiny_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    assert main(["demo", "--output", str(folder), "--seed", "5"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == str(folder)
    assert "| tra | iid |" in shown
    content = json.loads((folder / "results.json").read_text())
    assert content["command"] == "tra demo --seed 5 --attention tra rope"
    assert set(content["runs"]) == {"tra", "rope"}
    assert len(content["runs"]["tra"]["results"]) == 6
    assert (folder / "table.md").read_text() in shown
    for figure in ("accuracy.png", "attention.png"):
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")


def test_bench_prints_ratios_and_writes_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--only", "decode one", "--seconds", "0.01", "--output", str(tmp_path), "--json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["shape"] for row in rows] == ["1x8x4096", "1x8x65536", "8x8x4096", "8x8x65536"]
    assert all(row["ratio"] == row["milliseconds"] / row["against_milliseconds"] for row in rows)
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == rows
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("attention", ["tra", "rope"])
def test_a_new_token_is_timed_with_the_whole_cache_and_leaves_it_as_it_was(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    append = Cache.append

    def watched(cache: Cache, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = append(cache, *new)
        seen.append((new[0].shape[2], whole[0].shape[2], whole[0].data_ptr()))
        return whole

    monkeypatch.setattr(Cache, "append", watched)
    work = new_token(sized("mini", attention=attention), 300)
    filled = len(seen)
    for _ in range(3):
        work()
    layers = sized("mini").layers
    assert [entry[:2] for entry in seen] == [(301, 301)] * filled + [(1, 301)] * 3 * layers
    assert len({address for *_, address in seen}) == filled == layers, "nothing is copied"


def test_bench_refuses_figures_for_a_kernel_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tra.ops.threshold_relative import cpu

    right = cpu.forward

    def wrong(*arguments: object) -> object:
        out, state = right(*arguments)
        return out * 1.01, state

    monkeypatch.setattr(cpu, "forward", wrong)
    error = fails(["bench", "--only", "decode", "--seconds", "0.01", "--output", str(tmp_path)], capsys, code=1)
    assert "no figures: the kernel's results differ from the reference's" in error
    assert not (tmp_path / "bench.json").exists()


def test_the_command_says_what_to_install_when_extras_are_missing(tmp_path: Path) -> None:
    (tmp_path / "tyro.py").write_text("raise ModuleNotFoundError(\"No module named 'tyro'\")")
    process = subprocess.run(
        [sys.executable, "-m", "tra", "list"],
        env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert "pip install 'threshold-relative-attention[train]'" in process.stderr

"""`tra demo`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.calling import Captured, fails, shows
from tra.cli import main
from tra.errors import Interrupted
from tra.experiments import demo
from tra.experiments.local_jobs import run_cell
from tra.recipes import RecipeOf


def test_everything_is_written_for_every_seed_and_the_report_named_last(
    tiny_recipe: RecipeOf, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "DEMO", replace(demo.DEMO, scales={"quick": {"flip_flop": tiny_recipe}}))
    monkeypatch.setattr("tra.experiments.perform.run_all", lambda cells, jobs: [run_cell(cell) for cell in cells])
    monkeypatch.setattr("tra.experiments.perform.write_explorers", lambda cells: None)
    folder = tmp_path / "demo"
    shown = shows(["demo", "--output", str(folder), "--seeds", "2", "--attention", "tra,nope"], capsys)
    assert shown.splitlines()[-1] == str(folder / "report.html")
    assert "| tra | iid |" in shown
    assert "| nope | dense |" in shown
    assert "seeds without an error on any set" in shown
    assert (folder / "table.md").read_text() in shown
    content = json.loads((folder / "results.json").read_text())
    assert (content["runs"], content["finished"], content["failures"]) == (4, 4, {})
    assert content["sessions"][0]["command"] == f"tra demo --seeds 2 --attention tra nope --output {folder}"
    for figure in ("accuracy.png", "attention.png"):
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")
    report = (folder / "report.html").read_text()
    assert content["sessions"][0]["command"] in report
    assert report.count('<svg role="img"') == 3


def test_a_stopped_demo_says_how_it_goes_on(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Interrupted("stopped with 1 of 2 runs finished; the others go on from here")

    monkeypatch.setattr("tra.experiments.Experiment.perform", stop)
    folder = tmp_path / "my demo"
    assert main(["demo", "--output", str(folder), "--plugin", "json"]) == 130
    assert capsys.readouterr().err == (
        "tra: stopped with 1 of 2 runs finished; the others go on from here by: "
        f"tra demo --seeds 1 --attention tra rope --output '{folder}' --plugin json\n"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--attention tro", "attention must be one of alibi, "),
        ("--seeds 0", "seeds must be at least 1, got 0"),
        ("--jobs 0", "jobs must be at least 1, got 0"),
        ("--seed 3", "--seed is no option of tra demo; did you mean --seeds?"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: str, message: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in fails(["demo", *arguments.split()], capsys)
    assert list(tmp_path.iterdir()) == []

"""Runs shared among machines: each has its part, and every one sees the whole."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.experiments.small import TWO_COLUMNS, content_of, grid_of, of_flip_flop, smoke
from tra.cli import main
from tra.experiments import Request, Tuning
from tra.experiments.cells import Cell
from tra.experiments.grid import part_of


def test_shards_divide_the_runs_among_them(
    tmp_path: Path, two_columns: str, run_here: list[list[Cell]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shared"
    command = smoke(two_columns, folder, "--seeds", "1")
    everything = grid_of(TWO_COLUMNS, folder, seeds=1).cells()
    assert main([*command, "--shard", "1/2"]) == 0
    content = content_of(folder)
    assert (content["runs"], content["finished"]) == (6, 3)
    assert main([*command, "--shard", "2/2"]) == 0
    content = content_of(folder)
    assert (content["runs"], content["finished"]) == (6, 6)
    assert [session["trained"] for session in content["sessions"]] == [3, 3]
    first, second = ({cell.folder for cell in cells} for cells in run_here)
    assert not first & second
    assert first | second == {cell.folder for cell in everything}
    assert len(content["results"]) == 24
    capsys.readouterr()
    shared = (folder / "table.md").read_text()
    assert main(command) == 0
    assert len(run_here) == 2
    assert (folder / "table.md").read_text() == shared


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 18])
def test_a_machine_that_never_answers_costs_no_mechanism_its_whole_row(tmp_path: Path, count: int) -> None:
    cells = grid_of(TWO_COLUMNS, tmp_path, seeds=3).cells()
    parts = [part_of(cells, index, count) for index in range(1, count + 1)]
    assert sorted(cell.label for part in parts for cell in part) == sorted(cell.label for cell in cells)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        for row in ("tra", "rope", "nope"):
            mine = [cell for cell in part if cell.row == row]
            assert len(mine) < 6 or count == 1


def test_more_shards_than_runs_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(smoke("figure1", tmp_path / "out", "--seeds", "1", "--shard", "3/3")) == 2
    assert "shard must be one of at most 2, the number of runs, got 3/3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("run_here")
def test_figure1_is_drawn_from_another_seed_while_the_first_is_not_finished(
    tmp_path: Path, drawn: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    """As on the machine that runs the second shard."""
    assert main(smoke("figure1", tmp_path, "--seeds", "2", "--attention", "tra", "--shard", "2/2")) == 0
    assert capsys.readouterr().err == ""
    assert [panel.get_title() for panel in drawn[0].axes if panel.get_title()] == [
        f"tra, layer 1, head {i}" for i in (1, 2)
    ]


def test_what_is_tuned_on_other_machines_is_waited_for(
    tmp_path: Path, run_here: list[list[Cell]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every machine tunes its part; whoever is the last goes on with the runs that are reported."""
    experiment = of_flip_flop(tuning=Tuning({"learning_rate": (1e-3, 2e-3)}), seeds=2)
    first = experiment.perform(Request(tmp_path, "smoke", shard=(1, 2)))
    assert (first.cells, first.records, first.failures) == ([], [], {})
    assert "## Tuning" in first.shown
    assert not (tmp_path / "results.json").exists()
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr("tra.cli.reproduce.load_experiment", lambda name: experiment)
    assert main(smoke("mine", tmp_path, "--shard", "1/2")) == 0
    assert "2 of 4 runs of tuning are left to other machines\n" in capsys.readouterr().out
    second = experiment.perform(Request(tmp_path, "smoke", shard=(2, 2)))
    assert [len(cells) for cells in run_here] == [2, 2, 2]
    assert len(second.cells) == 2
    third = experiment.perform(Request(tmp_path, "smoke", shard=(1, 2)))
    assert len(third.cells) == 4
    assert len({(cell.row, cell.recipe.seed) for cell in third.cells}) == 4


def test_there_may_be_less_to_tune_than_machines(tmp_path: Path, run_here: list[list[Cell]]) -> None:
    experiment = replace(of_flip_flop(seeds=2), tuning=Tuning({"learning_rate": (1e-3, 2e-3)}, rows=("tra",)))
    third = experiment.perform(Request(tmp_path, "smoke", shard=(3, 3)))
    assert third.cells == []
    assert run_here == []

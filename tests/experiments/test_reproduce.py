"""`tra reproduce`: what a grid ends in, and what is rebuilt from it."""

import csv
import io
import json
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

import tra.experiments
from tests.experiments.conftest import REPRODUCE
from tests.experiments.small import PNG, TWO_COLUMNS, content_of, files_below, flip_flop, made_in, smoke
from tra.cli import main
from tra.experiments.cells import Cell
from tra.experiments.local_jobs import run_cell
from tra.experiments.table1 import SMOKE

MADE = {
    "table.md",
    "table.tex",
    "table.csv",
    "results.json",
    "report.html",
    "accuracy-flip_flop.png",
    "accuracy-instructed.png",
}


class Made(NamedTuple):
    """What one command left behind."""

    folder: Path
    command: list[str]
    shown: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two columns of two mechanisms with two seeds, run once for all tests, which leave the folder as it is."""
    folder = tmp_path_factory.mktemp("reproduce") / "grid"
    command = smoke("two", folder, "--attention", "tra,rope", "--jobs", "2")
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setitem(tra.experiments.BUILT_IN, "two", "tests.experiments.small:TWO_COLUMNS")
        patch.setattr(REPRODUCE, "run_all", lambda cells, jobs: [run_cell(cell) for cell in cells])
        assert main(command) == 0
    return Made(folder, command, shown.getvalue())


@pytest.fixture
def copied(made: Made, tmp_path: Path, two_columns: str, run_here: list[list[Cell]]) -> Made:
    """The same in a folder that a test may change."""
    folder = tmp_path / "grid"
    shutil.copytree(made.folder, folder)
    command = smoke(two_columns, folder, "--attention", "tra,rope", "--jobs", "2")
    return Made(folder, command, made.shown)


def test_a_grid_has_a_run_for_every_column_mechanism_and_seed(made: Made) -> None:
    runs = {
        f"{column}/{attention}/{seed}"
        for column in ("flip_flop", "instructed")
        for attention in ("tra", "rope")
        for seed in range(2)
    }
    found = {str(path.parent.relative_to(made.folder / "runs")) for path in made.folder.rglob("recipe.json")}
    assert found == runs
    assert made_in(made.folder) == MADE
    assert made.shown.splitlines()[-1] == str(made.folder)


def test_results_say_how_they_were_made(made: Made) -> None:
    content = content_of(made.folder)
    assert [(session["command"], session["trained"]) for session in content["sessions"]] == [
        (shlex.join(["tra", *made.command]), 8)
    ]
    assert (content["runs"], content["finished"], content["failures"]) == (8, 8, {})
    assert list(content["recipes"]) == ["flip_flop", "instructed"]
    assert {recipe["model"]["attention"] for recipe in content["recipes"].values()} == {"tra"}


def test_results_are_those_of_the_runs(made: Made) -> None:
    """Of two columns with two sets each at two lengths, of two mechanisms with two seeds."""
    results = content_of(made.folder)["results"]
    assert len(results) == 32
    for row in results:
        stored = content_of(made.folder / "runs" / row["column"] / row["attention"] / str(row["seed"]))["results"]
        assert {key: row[key] for key in stored[0]} in stored
        assert (row["measure"], row["tuned"]) == ("exact_match", False)
        assert row["learning_rate"] == SMOKE[row["column"]](attention=row["attention"]).learning_rate


def test_tables_are_shown_and_written_in_every_form(made: Made) -> None:
    table = (made.folder / "table.md").read_text()
    assert table in made.shown
    assert "| attention | flip_flop iid | flip_flop dense | instructed |" in table
    assert table.count("\n| tra |") == table.count("\n| rope |") == table.count("\n| test sequences | 4 | 4 |") == 5
    assert (made.folder / "table.tex").read_text().count(r"\begin{tabular}") == 5  # the last of token accuracy
    with open(made.folder / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 16
    assert {(line["seeds"], line["sequences"]) for line in lines} == {("2", "4")}


def test_the_same_command_again_changes_nothing(copied: Made, run_here: list[list[Cell]]) -> None:
    before = files_below(copied.folder / "runs")
    first = {name: (copied.folder / name).read_bytes() for name in MADE if "png" not in name}
    assert main(copied.command) == 0
    assert run_here == []
    assert files_below(copied.folder / "runs") == before
    assert {name: (copied.folder / name).read_bytes() for name in first} == first


def test_all_is_made_again_from_what_is_stored(copied: Made, run_here: list[list[Cell]]) -> None:
    """Though a third seed is asked for that was never run."""
    before = files_below(copied.folder / "runs")
    first = {name: (copied.folder / name).read_bytes() for name in MADE}
    for name in MADE:
        (copied.folder / name).unlink()
    assert main([*copied.command, "--seeds", "3", "--no-train"]) == 0
    assert run_here == []
    assert files_below(copied.folder / "runs") == before
    assert made_in(copied.folder) == MADE
    for name in ("table.md", "table.csv", "table.tex"):
        assert (copied.folder / name).read_bytes() == first[name]
    assert all((copied.folder / name).read_bytes().startswith(PNG) for name in MADE if name.endswith(".png"))
    content = content_of(copied.folder)
    assert (content["runs"], content["finished"], content["sessions"]) == (12, 8, [])


def test_a_run_that_fails_is_named_and_stops_no_other(copied: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """A third seed, one of whose folders holds something else."""
    before = files_below(copied.folder / "runs")
    stranger = copied.folder / "runs" / "flip_flop" / "rope" / "2"
    stranger.mkdir(parents=True)
    usual = TWO_COLUMNS.scales["smoke"]["flip_flop"](attention="rope")
    (stranger / "recipe.json").write_text(replace(usual, seed=2, batch=2).to_json())
    capsys.readouterr()
    assert main([*copied.command, "--seeds", "3"]) == 1
    shown = capsys.readouterr()
    reason = f"folder {stranger} holds a run of another recipe, with other values of batch (2, now 4)"
    assert shown.err == f"tra: flip_flop rope seed 2 failed: {reason}\n"
    assert shown.out.splitlines()[-1] == str(copied.folder)
    content = content_of(copied.folder)
    assert (content["runs"], content["finished"]) == (12, 11)
    assert [session["trained"] for session in content["sessions"]] == [8, 3]
    assert content["failures"] == {"flip_flop rope seed 2": reason}
    assert {name: entry for name, entry in files_below(copied.folder / "runs").items() if name in before} == before


@pytest.mark.usefixtures("run_here")
def test_a_failure_is_one_too_for_a_program_that_reads_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = tmp_path / "runs" / "flip_flop" / "fot" / "0"
    stranger.mkdir(parents=True)
    (stranger / "recipe.json").write_text(SMOKE["flip_flop"]().to_json())
    code = main(smoke("figure1", tmp_path, "--seeds", "1", "--json"))
    shown = capsys.readouterr()
    failures = json.loads(shown.out)["failures"]
    assert list(failures) == ["flip_flop fot seed 0"]
    reason = failures["flip_flop fot seed 0"]
    assert reason.startswith(f"folder {stranger} holds a run of another recipe, with other values of ")
    assert "model.attention ('tra', now 'fot')" in reason
    assert shown.err == f"tra: flip_flop fot seed 0 failed: {reason}\n"
    assert code == 1


def test_nothing_finished_is_said_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_here: list[list[Cell]]
) -> None:
    assert main(smoke("figure1", tmp_path / "new", "--no-train")) == 1
    assert capsys.readouterr().err == f"tra: error: no run in {tmp_path / 'new'} is finished\n"
    assert run_here == []
    one = tmp_path / "runs" / "flip_flop" / "tra" / "0"
    one.mkdir(parents=True)
    (one / "recipe.json").write_text("{}")
    assert main(smoke("figure1", tmp_path, "--attention", "tra", "--seeds", "1")) == 1
    assert f"no run in {tmp_path} is finished: " in capsys.readouterr().err


def test_a_folder_called_tra_where_one_works_is_not_taken_for_the_package(tmp_path: Path) -> None:
    (tmp_path / "tra").mkdir()
    (tmp_path / "tra" / "__init__.py").write_text("raise ImportError('the wrong package')")
    command = Path(sys.executable).with_name("tra")
    options = ["--scale", "smoke", "--seeds", "1", "--attention", "tra", "--output", "out"]
    done = subprocess.run([command, "reproduce", "figure1", *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cell_says_where_it_belongs() -> None:
    cell = Cell("flip_flop", "rope theta=9", flip_flop("rope"), Path("run"), choice={"learning_rate": 1e-3})
    assert cell.label == "flip_flop rope theta=9 learning_rate=0.001 seed 0"
    assert cell.choice_label == "learning_rate=0.001"
    assert not cell.tuned
    tuned = cell.with_settings({"learning_rate": 0.25})
    assert (tuned.recipe.learning_rate, tuned.tuned) == (0.25, True)
    assert cell.with_settings(None) == cell


def test_some_columns_are_run_first_and_all_of_them_are_shown_in_the_end(
    tmp_path: Path, two_columns: str, run_here: list[list[Cell]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = smoke(two_columns, tmp_path / "grid", "--attention", "tra", "--seeds", "1")
    assert main([*command, "--columns", "instructed"]) == 0
    assert [[cell.column for cell in cells] for cells in run_here] == [["instructed"]]
    assert list(content_of(tmp_path / "grid")["recipes"]) == ["instructed"]
    assert main(command) == 0
    assert [[cell.column for cell in cells] for cells in run_here[1:]] == [["flip_flop"]]
    assert list(content_of(tmp_path / "grid")["recipes"]) == ["flip_flop", "instructed"]
    capsys.readouterr()
    assert main([*command, "--columns", "flip_flip"]) == 2
    assert "columns must be one of flip_flop, instructed, got 'flip_flip'; did you mean 'flip_flop'?" in (
        capsys.readouterr().err
    )

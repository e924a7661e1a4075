"""`tra reproduce my_experiment.py`: the same grid, tables and figures for an experiment of one's own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

from tests.experiments.small import content_of, files_below, made_in
from tra import plugins
from tra.cli import main
from tra.experiments import load_experiment
from tra.runs import load_run

SOURCE = Path(__file__).with_name("own_experiment.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the file lies, and beside it the folder `out` of the experiment, run in processes of their own."""
    place = tmp_path_factory.mktemp("own")
    shutil.copy(SOURCE, place / "mine.py")
    command = [Path(sys.executable).with_name("tra"), "reproduce", "mine.py", "--jobs", "2", "--output", "out"]
    done = subprocess.run([*command, "--figures", "svg", "pdf"], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (place / "said").write_text(done.stdout)
    return place


def again(place: Path, *options: str) -> list[str]:
    return ["reproduce", str(place / "mine.py"), "--output", str(place / "out"), *options]


def test_its_runs_are_trained_side_by_side_with_its_own_mechanism_and_task(finished: Path) -> None:
    plugins.load(str(finished / "mine.py"))
    folder = finished / "out" / "runs" / "rare"
    assert sorted(path.name for path in folder.iterdir()) == ["recent-slope=0.5", "tra"]
    run = load_run(folder / "recent-slope=0.5" / "0")
    assert run.recipe.task == "rare_flip_flop"
    assert run.recipe.model.label == "recent slope=0.5"
    assert json.loads((run.folder / "recipe.json").read_text())["plugins"] == ["mine.py"]
    assert [result.length for result in run.results] == [8, 16]
    assert run.model.blocks[0].attention.slope == 0.5


def test_it_ends_in_tables_and_figures_like_those_of_the_paper(finished: Path) -> None:
    folder = finished / "out"
    assert made_in(folder) == {
        "accuracy-rare.pdf",
        "accuracy-rare.svg",
        "report.html",
        "results.json",
        "table.csv",
        "table.md",
        "table.tex",
    }
    table = (folder / "table.md").read_text()
    said = (finished / "said").read_text()
    assert table in said
    assert said.splitlines()[-1] == "out"
    assert "| tra† |" in table
    assert "| recent slope=0.5 |" in table
    assert "## Tuning" in table
    content = content_of(folder)
    assert (content["runs"], content["finished"]) == (2, 2)
    assert content["sessions"][0]["command"] == "tra reproduce mine.py --jobs 2 --output out --figures svg pdf"
    assert set(content["tuning"]) == {"rare recent slope=0.5"}


def test_the_same_command_does_nothing_twice(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_below(finished / "out" / "runs") | files_below(finished / "out" / "tuning")
    content = content_of(finished / "out")
    assert main(again(finished, "--jobs", "2", "--figures", "svg,pdf")) == 0
    assert "2 of 2 runs are finished already" in capsys.readouterr().out
    assert main(again(finished, "--no-train", "--figures", "svg,pdf", "--json")) == 0
    assert json.loads(capsys.readouterr().out) == content_of(finished / "out") == content
    assert files_below(finished / "out" / "runs") | files_below(finished / "out" / "tuning") == before


def test_shards_of_it_are_run_by_processes_that_know_the_file(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With as many threads each as the whole had, they come to the same bits."""
    folder = tmp_path / "out"
    shutil.copytree(finished / "out" / "tuning", folder / "tuning")
    command = ["reproduce", str(finished / "mine.py"), "--output", str(folder), "--figures", "svg", "--jobs", "2"]
    assert main([*command, "--shard", "1/2"]) == 0
    assert content_of(folder)["finished"] == 1
    assert main([*command, "--shard", "2/2"]) == 0
    content = content_of(folder)
    assert content["finished"] == 2
    assert [session["trained"] for session in content["sessions"]] == [1, 1]
    assert content["results"] == content_of(finished / "out")["results"]
    assert capsys.readouterr().err == ""


def test_a_style_changes_the_figure_and_a_wrong_one_is_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished / "out", tmp_path / "out")
    command = ["reproduce", str(finished / "mine.py"), "--output", str(tmp_path / "out"), "--no-train"]
    images = []
    for style in ([], ["--style", "dark_background"], []):
        assert main([*command, *style]) == 0
        images.append(matplotlib.image.imread(tmp_path / "out" / "accuracy-rare.png")[..., :3])
    plain, dark, after = images
    assert plain.mean() > 0.8
    assert dark.mean() < 0.2
    assert (plain == after).all()
    before = files_below(tmp_path)
    capsys.readouterr()
    assert main([*command, "--style", "dark_backgroun"]) == 2
    assert capsys.readouterr().err == ("tra: error: style must be a style sheet of matplotlib, got 'dark_backgroun'\n")
    assert files_below(tmp_path) == before


def test_its_own_scales_are_those_it_has(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_experiment(str(finished / "mine.py")).usual_scale == "tiny"
    assert main(again(finished, "--scale", "small")) == 2
    assert "scale must be one of tiny, got 'small'" in capsys.readouterr().err


def test_the_folder_is_called_after_the_file_unless_somebody_says(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "out", tmp_path / "runs" / "mine-tiny")
    assert main(["reproduce", str(finished / "mine.py"), "--no-train"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "runs/mine-tiny"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "must define an Experiment called experiment, got none"),
        ("experiment = {}", "must define an Experiment called experiment, got dict"),
    ],
)
def test_a_file_without_an_experiment_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(text)
    assert main(["reproduce", str(tmp_path / "wrong.py"), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()

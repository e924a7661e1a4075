"""`tra reproduce`; what it does is tested with `tra.experiments`."""

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calling import Captured, fails, help_of, json_of, shows
from tra.cli import main
from tra.errors import Interrupted
from tra.experiments import BUILT_IN, Experiment, Outcome, Request, reproduce
from tra.experiments.grid import Grid
from tra.experiments.request import Shard
from tra.recipes import RecipeOf


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the experiment was asked for."""
    requests: list[Request] = []

    def perform(_: Any, request: Request) -> Outcome:
        requests.append(request)
        return Outcome([], [], {}, request.folder, "the table", {"runs": 3})

    monkeypatch.setattr("tra.experiments.Experiment.perform", perform)
    return requests


def test_options_reach_the_experiment(asked: list[Request], capsys: Captured) -> None:
    words = (
        "reproduce table1 --scale smoke --seeds 4 --attention tra,rope nope --jobs 3 --shard 2/3 --no-train "
        "--figures svg,pdf --style ggplot --cluster local --cluster-options timeout_min=5,name=x gpus_per_node=1 "
        "--output some/where"
    )
    assert shows(shlex.split(words), capsys) == "the table\nsome/where\n"
    (request,) = asked
    assert request == Request(
        folder=Path("some/where"),
        scale="smoke",
        seeds=4,
        attention=("tra", "rope", "nope"),
        jobs=3,
        shard=Shard(2, 3),
        train=False,
        cluster="local",
        cluster_options={"timeout_min": 5, "name": "x", "gpus_per_node": 1},
        figures=("svg", "pdf"),
        style="ggplot",
        command=f"tra {words}",
    )


def test_what_the_command_asks_for_can_be_asked_for_from_python(asked: list[Request], capsys: Captured) -> None:
    """Every field of a request is an option, and an argument of the function."""
    words = (
        "reproduce table1 --output out --scale smoke --seeds 2 --attention tra --columns flip_flop --jobs 2 "
        "--shard 1/2 --no-train --figures svg --style ggplot --join a.json --cluster local "
        "--cluster-options timeout_min=5 --steps 7 --set batch=4 model.width=8"
    )
    shows(shlex.split(words), capsys)
    reproduce(
        "table1",
        "out",
        scale="smoke",
        seeds=2,
        attention="tra",
        columns=["flip_flop"],
        jobs=2,
        shard=(1, 2),
        train=False,
        figures=["svg"],
        style="ggplot",
        join=["a.json"],
        cluster="local",
        cluster_options={"timeout_min": 5},
        steps=7,
        set={"batch": 4, "model.width": 8},
        command=f"tra {words}",
    )
    assert asked[0] == asked[1]
    usual = Request()
    same = [name.name for name in fields(Request) if getattr(asked[0], name.name) == getattr(usual, name.name)]
    assert same == [], "an option is missing above"


def test_usual_values(asked: list[Request], capsys: Captured) -> None:
    assert json_of(["reproduce", "table1"], capsys) == {"runs": 3}
    (request,) = asked
    assert request == Request(Path("runs/table1-small"), "small", command="tra reproduce table1 --json")
    reproduce("table1", command="tra reproduce table1 --json")
    assert asked == [request, request]


def test_help_names_every_experiment(capsys: Captured) -> None:
    shown = " ".join(help_of(["reproduce"], capsys).split())
    names = shown.partition(", or the path of a file")[0].rpartition("NAME|FILE ")[2]
    assert sorted(names.split(", ")) == sorted(BUILT_IN)


def test_failures_are_said_and_the_exit_code_is_one(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    outcome = Outcome([], [], {"copy tra seed 0": "the loss is nan"}, Path("x"), "the table")
    monkeypatch.setattr("tra.experiments.Experiment.perform", lambda *_: outcome)
    assert main(["reproduce", "table1"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "tra: copy tra seed 0 failed: the loss is nan\n"
    assert "the table" in shown.out


def test_a_stopped_grid_says_how_it_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def stop(*_: object) -> None:
        raise Interrupted("stopped with 1 of 2 runs finished; the others go on from here")

    monkeypatch.setattr("tra.experiments.Experiment.perform", stop)
    assert main(["reproduce", "table1", "--output", "my folder", "--plugin", "json"]) == 130
    expected = "the others go on from here by: tra reproduce table1 --output 'my folder' --plugin json\n"
    assert capsys.readouterr().err.endswith(expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("tabel1", "got 'tabel1'; did you mean 'table1'?"),
        ("cost", "name must be an experiment, and cost is a benchmark: tra bench --cost"),
        ("nowhere.py", "an experiment must be a name or a file that exists, got nowhere.py"),
        ("table1 --shard 3/2", "shard must be i/n with 1 <= i <= n, got 3/2"),
        ("table1 --shard 0/2", "shard must be i/n with 1 <= i <= n, got 0/2"),
        ("table1 --shard half", "--shard must be i/n with 1 <= i <= n, got 'half'"),
        ("table1 --shard 1/2/3", "--shard must be i/n with 1 <= i <= n, got '1/2/3'"),
        ("table1 --seeds 0", "seeds must be at least 1, got 0"),
        ("table1 --jobs 0", "jobs must be at least 1, got 0"),
        ("table1 --scale smal", "got 'smal'; did you mean 'small'?"),
        ("table1 --attention tro", "attention must be one of "),
        ("figure1 --attention tra,rop", "got 'rop'; did you mean 'rope'?"),
        ("table1 --figures pgn", "figures must be one of pdf, png, svg, got 'pgn'; did you mean 'png'?"),
        ("table1 --style ggplott", "style must be a style sheet of matplotlib, got 'ggplott'"),
        ("table1 --cluster slrm", "cluster must be one of local, slurm, got 'slrm'; did you mean 'slurm'?"),
        ("table1 --cluster-options partition", "--cluster-options must be NAME=VALUE, got 'partition'"),
        ("table1 --dry", "--dry is no option of tra reproduce; did you mean --dry-run?"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: str, message: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in fails(["reproduce", *arguments.split()], capsys)
    assert list(tmp_path.iterdir()) == []


def test_steps_and_other_fields_of_every_recipe_can_be_set(tiny_recipe: RecipeOf) -> None:
    experiment = Experiment(scales={"small": {"flip_flop": tiny_recipe}}, rows=("tra", "nope"))
    asked = Request(Path("out"), attention=("nope",), steps=2, set={"model.width": 8, "length": 8})
    (cell,) = Grid.of(experiment, asked).cells()
    assert (cell.recipe.steps, cell.recipe.model.width, cell.recipe.length) == (2, 8, 8)
    assert [entry.length for entry in cell.recipe.evaluations][::3] == [8, 16], "at as many times the training length"


def test_what_is_set_is_in_the_folders_name(asked: list[Request], capsys: Captured) -> None:
    shown = shows(["reproduce", "table1", "--steps", "20", "--set", "model.width=8"], capsys)
    assert shown.splitlines()[-1] == "runs/table1-small-model.width=8-steps=20"


@pytest.mark.parametrize(
    "words, message",
    [
        ("table1 --set seed=3", "set must leave the seed alone"),
        ("table1 --set stepps=3", "a field of a recipe must be among .*did you mean 'steps'"),
        ("table1 --steps 3 --set steps=4", "steps must be given once, got 3 and 4"),
        ("table1 --steps 0", "steps must be at least 1, got 0"),
        ("table1 --set learning_rate=0.1", "set must leave learning_rate alone: rows or tuning of this experiment"),
    ],
)
def test_what_cannot_be_set_is_named(words: str, message: str, tmp_path: Path, capsys: Captured) -> None:
    assert re.search(message, fails(["reproduce", *words.split(), "--output", str(tmp_path / "out")], capsys))
    assert not (tmp_path / "out").exists()

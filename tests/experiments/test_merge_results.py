"""Results from machines that share no folder, shown as those of one."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.small import content_of, files_below, flip_flop, grid_of, of_flip_flop, sets
from tra.errors import RunError
from tra.experiments import Experiment, Request, Tuning, sweep
from tra.experiments.cells import Cell
from tra.experiments.demo import DEMO
from tra.experiments.figure1 import FIGURE1
from tra.progress import shown
from tra.recipes import Recipe


def dense(attention: str = "tra") -> Recipe:
    return replace(flip_flop(attention), evaluations=sets("dense"))


TUNED = Experiment(
    {"smoke": {"a": flip_flop, "b": dense}},
    ("tra", "rope"),
    tuning=Tuning(
        {"learning_rate": (1e-3, 2e-3)}, rounds=((0.5, None), (1.0, 1)), extended="learning_rate", tolerance=1e-4
    ),
)
MADE = ("table.md", "table.tex", "table.csv")


@pytest.mark.usefixtures("run_here")
def test_parts_of_an_experiment_make_the_tables_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row on one machine, the other on two of which each has a column; the last has its own part in its folder.
    Every session takes as long as the others: it is known by when it began."""
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    whole = tmp_path / "whole"
    TUNED.perform(Request(whole, "smoke"))
    TUNED.perform(Request(tmp_path / "first", "smoke", attention=["rope"]))
    TUNED.perform(Request(tmp_path / "second", "smoke", attention=["tra"], columns=["b"]))
    last = tmp_path / "last"
    TUNED.perform(Request(last, "smoke", attention=["tra"], columns=["a"]))
    files = files_below(last / "runs")
    elsewhere = [tmp_path / name / "results.json" for name in ("first", "second", "first")]
    for _ in range(2):  # the second time its own results.json holds them all
        TUNED.perform(Request(last, "smoke", train=False, join=elsewhere))
        for name in MADE:
            assert (last / name).read_text() == (whole / name).read_text()
        ours, theirs = content_of(last), content_of(whole)
        for name in ("results", "tuning", "runs", "finished"):
            assert ours[name] == theirs[name]
        assert sum(session["trained"] for session in ours["sessions"]) == sum(
            session["trained"] for session in theirs["sessions"]
        )
    assert files_below(last / "runs") == files

    none = tmp_path / "none"
    TUNED.perform(Request(none, "smoke", train=False, join=[last / "results.json"]))
    assert (none / "table.md").read_text() == (whole / "table.md").read_text()


@pytest.mark.usefixtures("run_here")
def test_seeds_that_a_join_leaves_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TUNED.perform(Request(tmp_path / "two", "smoke", seeds=2))
    capsys.readouterr()
    for seeds, said in ((1, True), (2, False)):
        request = Request(
            tmp_path / f"join-{seeds}", "smoke", seeds=seeds, train=False, join=[tmp_path / "two/results.json"]
        )
        with shown():
            TUNED.perform(request)
        output = "".join(capsys.readouterr())
        assert ("--seeds 2 takes them in" in " ".join(output.split())) == said


@pytest.mark.parametrize("asked, said", [([], True), (["tra"], False)])
def test_rows_that_a_join_leaves_out_are_named_unless_rows_were_asked_for(
    asked: list[str], said: bool, tmp_path: Path, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    with shown():
        of_flip_flop(rows=("tra", "nope")).perform(
            Request(tmp_path / "two", "smoke", attention=asked, train=False, join=[stored])
        )
    output = " ".join("".join(capsys.readouterr()).split())
    assert ("--attention with all rows takes them in: rope" in output) == said


def test_what_was_tuned_and_run_elsewhere_is_neither_tuned_nor_run_again(
    tmp_path: Path, run_here: list[list[Cell]]
) -> None:
    """One more seed and one more row, of which the other machine has neither."""
    whole = TUNED.perform(Request(tmp_path / "whole", "smoke", seeds=2))
    TUNED.perform(Request(tmp_path / "first", "smoke", attention=["tra"]))
    run_here.clear()
    request = Request(tmp_path / "second", "smoke", seeds=2, join=[tmp_path / "first" / "results.json"])
    lines = TUNED.plan(request).rows
    outcome = TUNED.perform(request)
    assert {cell.row for asked in run_here for cell in asked if cell.choice} == {"rope"}
    reported = [(cell.column, cell.row, cell.recipe.seed) for asked in run_here for cell in asked if not cell.choice]
    ours = [*(("rope", seed) for seed in range(2)), ("tra", 1)]
    assert sorted(reported) == [(column, *run) for column in "ab" for run in ours]
    assert outcome.shown == whole.shown
    for name in ("results", "tuning", "runs", "finished"):
        assert outcome.content[name] == whole.content[name]
    assert [line[:3] for line in lines if line[1] == "tra"] == [["a", "tra", "1"], ["b", "tra", "1"]]


@pytest.fixture
def stored(tmp_path: Path, run_here: list[list[Cell]]) -> Path:
    """Of TRA and RoPE with one seed."""
    of_flip_flop().perform(Request(tmp_path / "one", "smoke"))
    run_here.clear()
    return tmp_path / "one" / "results.json"


def changed(stored: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(stored.read_text())
    change(content)
    path = stored.with_name("changed.json")
    path.write_text(json.dumps(content))
    return path


def longer(attention: str = "tra") -> Recipe:
    return replace(flip_flop(attention), steps=5)


EVIDENCE = {
    "column": "flip_flop",
    "seeds": [1000],
    "rounds": [{"share_of_steps": share, "losses": {}} for share in (0.5, 1.0)],
    "chosen": {"learning_rate": 1e-3, "warmup": 0.1},
}

REFUSED: dict[str, tuple[Experiment, Callable[[dict[str, Any]], None], str]] = {
    "other steps": (
        of_flip_flop(scales={"smoke": {"flip_flop": longer}}),
        lambda content: None,
        "steps of flip_flop is 4 there and 5 here",
    ),
    "other column": (
        of_flip_flop(scales={"smoke": {"another": flip_flop}}),
        lambda content: None,
        "it has none of the columns, rows and seeds",
    ),
    "other rate": (
        of_flip_flop(),
        lambda content: content["results"][-1].update(learning_rate=0.5),
        "learning_rate of flip_flop rope is 0.5 there and 0.001 here",
    ),
    "other options": (
        of_flip_flop(),
        lambda content: content["results"][0]["options"].update(threshold=3.0),
        "threshold of flip_flop tra is 3.0 there and None here",
    ),
    "damaged": (of_flip_flop(), lambda content: content["results"][0].pop("attention"), "it has no 'attention'"),
    "an entry twice": (
        of_flip_flop(),
        lambda content: content["results"].append(content["results"][0]),
        "flip_flop tra seed 0 must hold every evaluation of its recipe once, got iid 8 twice, or without need",
    ),
    "an entry missing": (
        of_flip_flop(),
        lambda content: content["results"].pop(),
        "flip_flop rope seed 0 must hold every evaluation of its recipe once, got no iid 16",
    ),
    "other sequences": (
        of_flip_flop(),
        lambda content: content["results"][0].update(examples=3, parts=None, exact_match=0.0),
        "flip_flop tra seed 0 must hold every evaluation of its recipe once, got iid 8 of 3 sequences",
    ),
    "other tuned settings": (
        of_flip_flop(tuning=TUNED.tuning),
        lambda content: content.update(tuning={"flip_flop tra": EVIDENCE, "flip_flop rope": EVIDENCE}),
        r"what was tuned of flip_flop tra is \['learning_rate', 'warmup'\] there and \['learning_rate'\] here",
    ),
    "not tuned": (of_flip_flop(tuning=TUNED.tuning), lambda content: None, "it has no 'flip_flop tra'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_results_of_something_else_are_refused_before_anything_is_trained(
    name: str, tmp_path: Path, stored: Path, run_here: list[list[Cell]]
) -> None:
    experiment, change, reason = REFUSED[name]
    path = changed(stored, change)
    with pytest.raises(ValueError, match=f"join must name results of this experiment, but .* differs: {reason}"):
        experiment.perform(Request(tmp_path / "two", "smoke", join=[path]))
    with pytest.raises(ValueError, match=r"join must name files that exist, got .*missing\.json"):
        experiment.perform(Request(tmp_path / "two", "smoke", join=[tmp_path / "missing.json"]))
    assert run_here == []
    assert not (tmp_path / "two").exists()


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever reads one waits for a writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe differs: .*Not a regular file"):
        of_flip_flop().perform(Request(tmp_path / "two", "smoke", join=[tmp_path / "pipe"]))


def test_a_run_that_failed_elsewhere_is_not_forgotten(tmp_path: Path, stored: Path) -> None:
    def fail(content: dict[str, Any]) -> None:
        content["results"] = [entry for entry in content["results"] if entry["attention"] != "rope"]
        content["failures"] = {"flip_flop rope seed 0": "it diverged", "flip_flop cope seed 0": "not asked for"}

    request = Request(tmp_path / "two", "smoke", train=False, join=[changed(stored, fail)])
    outcome = of_flip_flop().perform(request)
    assert outcome.failures == {"flip_flop rope seed 0": "it diverged"}
    assert outcome.content["finished"] == 1
    outcome = of_flip_flop().perform(replace(request, join=[*request.join, stored]))
    assert outcome.failures == {}


@pytest.mark.usefixtures("run_here")
def test_rows_of_different_lengths_keep_their_own_and_more_seeds_than_asked_for_are_left_out(tmp_path: Path) -> None:
    experiment = of_flip_flop(rows=sweep(["tra"], {"length": (8, 16)}), seeds=2)
    whole = experiment.perform(Request(tmp_path / "one", "smoke", seeds=1))
    experiment.perform(Request(tmp_path / "one", "smoke"))
    joined = Request(tmp_path / "two", "smoke", seeds=1, train=False, join=[tmp_path / "one" / "results.json"])
    again = experiment.perform(joined)
    assert [record.trained for record in again.records] == [8, 8, 16, 16]
    assert (again.content["runs"], again.content["finished"]) == (2, 2)
    assert again.shown == whole.shown


def test_what_was_tuned_on_one_column_elsewhere_serves_the_others(tmp_path: Path, run_here: list[list[Cell]]) -> None:
    assert TUNED.tuning is not None
    experiment = replace(TUNED, tuning=replace(TUNED.tuning, column="a"))
    whole = experiment.perform(Request(tmp_path / "whole", "smoke"))
    experiment.perform(Request(tmp_path / "first", "smoke", columns=["a"]))
    run_here.clear()
    joined = [tmp_path / "first" / "results.json"]
    outcome = experiment.perform(Request(tmp_path / "second", "smoke", join=joined))
    assert [[(cell.column, cell.row) for cell in asked] for asked in run_here] == [[("b", "tra"), ("b", "rope")]]
    assert outcome.shown == whole.shown
    for name in ("results", "tuning"):
        assert outcome.content[name] == whole.content[name]


def test_two_files_whose_rows_were_tuned_differently_on_one_column_are_not_shown_together(
    tmp_path: Path, run_here: list[list[Cell]]
) -> None:
    assert TUNED.tuning is not None
    experiment = replace(TUNED, tuning=replace(TUNED.tuning, column="a"))
    experiment.perform(Request(tmp_path / "one", "smoke", attention=["tra"]))
    stored = tmp_path / "one" / "results.json"
    of_a = tmp_path / "of-a.json"
    content = json.loads(stored.read_text())
    content["results"] = [entry for entry in content["results"] if entry["column"] == "a"]
    of_a.write_text(json.dumps(content))
    request = Request(tmp_path / "two", "smoke", seeds=2, attention=["tra"], train=False)
    for files in ([of_a, changed(stored, choose_another_rate)], [changed(stored, choose_another_rate), of_a]):
        with pytest.raises(ValueError, match=r"tuning of a tra chose .* there and .* in a file before it"):
            experiment.perform(replace(request, join=files))


def choose_another_rate(content: dict[str, Any]) -> None:
    """For seed 1, in place of seed 0."""
    for evidence in content["tuning"].values():
        evidence["chosen"]["learning_rate"] = 0.5
    for entry in content["results"]:
        entry.update(learning_rate=0.5, seed=1)


def test_runs_here_with_other_settings_than_were_tuned_elsewhere_are_refused_before_anything_is_trained(
    tmp_path: Path, run_here: list[list[Cell]]
) -> None:
    TUNED.perform(Request(tmp_path / "one", "smoke", columns=["a"], attention=["tra"]))
    run_here.clear()
    elsewhere = changed(tmp_path / "one" / "results.json", choose_another_rate)
    request = Request(tmp_path / "one", "smoke", seeds=3, attention=["tra"], columns=["a"], join=[elsewhere])
    for train in (True, False):
        with pytest.raises(ValueError, match=r"tuned as the runs here are, but .*learning_rate"):
            TUNED.perform(replace(request, train=train))
    assert run_here == []


def test_a_tuning_that_was_begun_here_does_not_matter_where_another_is_joined(
    tmp_path: Path, run_here: list[list[Cell]]
) -> None:
    whole = TUNED.perform(Request(tmp_path / "one", "smoke", seeds=2))
    TUNED.perform(Request(tmp_path / "two", "smoke"))
    for name in ("results.json", "runs"):
        path = tmp_path / "two" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    first = next((tmp_path / "two" / "tuning").rglob("results.json"))
    first.unlink()
    run_here.clear()
    joined = [tmp_path / "one" / "results.json"]
    outcome = TUNED.perform(Request(tmp_path / "two", "smoke", seeds=2, join=joined))
    assert [cell for asked in run_here for cell in asked] == []
    assert outcome.shown == whole.shown


@pytest.mark.usefixtures("run_here")
def test_a_run_that_failed_here_and_is_finished_elsewhere_is_no_failure(tmp_path: Path, stored: Path) -> None:
    folder = tmp_path / "two"
    (cell,) = grid_of(of_flip_flop(), folder, attention=["tra"]).cells()
    cell.run.record_failure("out of memory")
    outcome = of_flip_flop().perform(Request(folder, "smoke", join=[stored]))
    assert (outcome.failures, outcome.content["finished"]) == ({}, 2)


@pytest.mark.usefixtures("run_here")
def test_a_tuning_that_failed_elsewhere_and_succeeded_here_is_no_failure(tmp_path: Path) -> None:
    TUNED.perform(Request(tmp_path / "one", "smoke", columns=["a"], attention=["tra"]))

    def fail(content: dict[str, Any]) -> None:
        content["failures"] = {"a rope (tuning)": "every choice diverged", "b rope (tuning)": "every choice diverged"}

    elsewhere = changed(tmp_path / "one" / "results.json", fail)
    outcome = TUNED.perform(Request(tmp_path / "two", "smoke", columns=["a"], join=[elsewhere]))
    assert outcome.failures == {}
    outcome = TUNED.perform(Request(tmp_path / "two", "smoke", train=False, join=[elsewhere]))
    assert outcome.failures == {"b rope (tuning)": "every choice diverged"}


@pytest.mark.usefixtures("run_here")
def test_machines_that_join_different_files_divide_the_runs_alike(tmp_path: Path) -> None:
    """The second joins what the first has written into the folder that they share."""
    experiment = of_flip_flop(seeds=4)
    request = Request(tmp_path / "shared", "smoke", shard=(1, 2))
    experiment.perform(request)
    outcome = experiment.perform(replace(request, shard=(2, 2), join=[tmp_path / "shared" / "results.json"]))
    assert outcome.content["finished"] == 8


def test_the_column_on_which_all_are_tuned_must_be_there(tmp_path: Path) -> None:
    assert TUNED.tuning is not None
    experiment = replace(TUNED, tuning=replace(TUNED.tuning, column="a"))
    with pytest.raises(ValueError, match="columns must hold a, on which all are tuned, got b"):
        experiment.perform(Request(tmp_path / "one", "smoke", columns=["b"]))


@pytest.mark.usefixtures("run_here")
def test_tunings_that_chose_differently_are_not_averaged(tmp_path: Path) -> None:
    TUNED.perform(Request(tmp_path / "one", "smoke", columns=["a"], attention=["tra"]))
    stored = tmp_path / "one" / "results.json"

    request = Request(
        tmp_path / "two",
        "smoke",
        seeds=2,
        attention=["tra"],
        train=False,
        join=[stored, changed(stored, choose_another_rate)],
    )
    with pytest.raises(ValueError, match=r"tuning of a tra chose .*0.5.* there and .* in a file before it"):
        TUNED.perform(request)


@pytest.mark.usefixtures("run_here")
def test_what_needs_a_model_says_so(tmp_path: Path) -> None:
    for experiment in (FIGURE1, DEMO):
        experiment.perform(Request(tmp_path / "one", "smoke"))
        request = Request(tmp_path / "two", "smoke", train=False, join=[tmp_path / "one" / "results.json"])
        if experiment is DEMO:
            assert (experiment.perform(request).folder / "accuracy.png").exists()
        else:
            with pytest.raises(RunError, match="attention is drawn from runs that are here, and there is none"):
                experiment.perform(request)
        shutil.rmtree(tmp_path / "one")

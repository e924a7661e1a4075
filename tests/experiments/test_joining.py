"""Results from machines that share no folder, shown as those of one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.experiments.small import content_of, files_below, flip_flop, of_flip_flop, sets
from tra.experiments import Experiment, Request, Tuning
from tra.experiments.base import Cell
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
def test_parts_of_an_experiment_make_the_tables_of_the_whole(tmp_path: Path) -> None:
    """A row on one machine, the other on two of which each has a column; the last has its own part in its folder."""
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


def test_results_of_something_else_are_refused_before_anything_is_trained(
    tmp_path: Path, run_here: list[list[Cell]]
) -> None:
    of_flip_flop().perform(Request(tmp_path / "one", "smoke"))
    stored = tmp_path / "one" / "results.json"

    def longer(attention: str = "tra") -> Recipe:
        return replace(flip_flop(attention), steps=5)

    damaged = tmp_path / "damaged.json"
    content = json.loads(stored.read_text())
    del content["results"][0]["attention"]
    damaged.write_text(json.dumps(content))
    cases = (
        (of_flip_flop(scales={"smoke": {"flip_flop": longer}}), stored, "steps of flip_flop is 4 there and 5 here"),
        (of_flip_flop(), tmp_path / "missing.json", "No such file"),
        (of_flip_flop(), damaged, "it has no 'attention'"),
    )
    for experiment, path, reason in cases:
        with pytest.raises(ValueError, match=f"join must name results of this experiment, but .*{reason}"):
            experiment.perform(Request(tmp_path / "two", "smoke", join=[path]))
    assert len(run_here) == 1
    assert not (tmp_path / "two").exists()

"""A run that version 0.1.0 itself made, in `version_01`: what it measured is read, measured again and reported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.calling import Captured, json_of, shows
from tra.experiments import Experiment, reproduce
from tra.recipes import Recipe
from tra.runs import evaluate, load_run, train
from tra.tasks import ExactMatch

MADE = Path(__file__).parent / "version_01"
"""The folder of ``tra reproduce figure1 --scale smoke --seeds 1``, stopped after its first run."""
RUN = Path("runs", "flip_flop", "tra", "0")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A copy of the folder."""
    return shutil.copytree(MADE, tmp_path / "made")


def test_it_is_read_as_it_was_stored() -> None:
    run = load_run(MADE / RUN)
    stored = json.loads((MADE / RUN / "results.json").read_text())
    assert stored["environment"]["tra"] == "0.1.0"
    expected = [
        ExactMatch(one["set"], 64, 4, None, one["loss"], None, one["exact_match"], one["token_accuracy"])
        for one in stored["results"]
    ]
    assert run.finished(run.recipe) == expected
    assert [result.set for result in expected] == ["iid", "sparse", "dense"]
    assert [entry["step"] for entry in run.metrics()] == [1, 2, 3, 4]
    assert run.step == 4


def test_it_measures_what_it_measured_then() -> None:
    run = load_run(MADE / RUN)
    for now, then in zip(evaluate(run), run.results or [], strict=True):
        assert isinstance(now, ExactMatch)
        assert isinstance(then, ExactMatch)
        assert (now.set, now.exact_match, now.token_accuracy) == (then.set, then.exact_match, then.token_accuracy)
        assert now.loss == pytest.approx(then.loss, rel=1e-5)


def test_stopped_half_way_it_ends_with_the_weights_it_had(made: Path) -> None:
    run = made / RUN
    then = load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "results.json").unlink()
    again = train(load_run(run).recipe, run)
    assert again.step == 4
    for name, tensor in again.model.state_dict().items():
        torch.testing.assert_close(tensor, then[name], rtol=1e-4, atol=1e-6)


def as_stored(attention: str) -> Recipe:
    return load_run(MADE / RUN).recipe


SAME = Experiment({"smoke": {"flip_flop": as_stored}}, ["tra"])
"""What version 0.1 was asked for."""


def test_an_experiment_takes_it_for_its_own_and_reports_it(made: Path) -> None:
    outcome = reproduce(SAME, made, scale="smoke", train=False)
    assert [record.result.set for record in outcome.records] == ["iid", "sparse", "dense"]
    assert "| tra | 0.00 [0.00, 0.60] | 0.25 [" in (made / "table.md").read_text()
    assert "flip_flop" in (made / "report.html").read_text()
    (session,) = json.loads((made / "results.json").read_text())["sessions"]
    assert (session["environment"]["tra"], session["trained"]) == ("0.1.0", 1)


def test_its_results_can_be_joined(tmp_path: Path) -> None:
    outcome = reproduce(SAME, tmp_path, scale="smoke", train=False, join=[MADE / "results.json"])
    stored = json.loads((MADE / RUN / "results.json").read_text())["results"]
    assert [(record.result.set, record.result.value) for record in outcome.records] == [
        (one["set"], one["exact_match"]) for one in stored
    ]
    assert not any(record.tuned for record in outcome.records)


def test_commands_read_it(made: Path, capsys: Captured) -> None:
    stored = json.loads((made / RUN / "results.json").read_text())["results"]
    found = json_of(["evaluate", str(made / RUN)], capsys)["results"]
    assert [one["exact_match"] for one in found] == [one["exact_match"] for one in stored]
    assert "gate" in shows(["inspect", str(made / RUN), "--length", "8", "--html"], capsys)

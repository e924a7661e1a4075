"""Trackers are told what the log is told; one that cannot be had is named before anything is trained."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.tiny import TINY
from tra.recipes import Evaluation
from tra.runs import distributed, train

METRICS = ("loss", "gradient_norm", "learning_rate", "tokens_per_second")


def test_tensorboard_is_told_every_metric_and_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = replace(TINY, steps=3, validate_every=2, evaluations=(Evaluation("iid", 16, 3),))
    run = train(recipe, tmp_path / "run", track=("tensorboard",))
    folders = {path.parent for path in run.folder.rglob("events.out.tfevents*")}
    told: dict[str, list[tuple[int, float]]] = {}
    for folder in folders:
        accumulator = EventAccumulator(str(folder))
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            told[tag] = [(event.step, event.value) for event in accumulator.Scalars(tag)]
    for name in METRICS:
        logged = [(entry["step"], entry[name]) for entry in run.metrics()]
        assert [step for step, _ in told[name]] == [1, 2, 3]
        assert [value for _, value in told[name]] == pytest.approx([value for _, value in logged], rel=1e-6)
    assert [step for step, _ in told["validation/exact_match"]] == [2, 3]
    assert [step for step, _ in told["validation/iid@16/token_accuracy"]] == [2, 3]
    (at_the_end,) = told["evaluation/iid@16/exact_match"]
    assert at_the_end == (3, pytest.approx(run.results[0].value))
    (settings,) = (path.read_text() for path in run.folder.rglob("hparams.yml"))
    assert "learning_rate: 0.001\n" in settings
    assert "model.width: 32\n" in settings


# In a process of its own, which its threads do not outlive.
WANDB = """
import sys
from dataclasses import replace
from tests.runs.tiny import TINY
from tra.runs import train
train(replace(TINY, steps=3), sys.argv[1], track=("wandb",))
"""


def test_wandb_is_told_every_metric_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    process = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path / "run")],
        env={**os.environ, **offline, "WANDB_CACHE_DIR": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (stored,) = (tmp_path / "wandb").rglob("run-*.wandb")
    told = _records(stored)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in METRICS:
        assert [entry[name] for entry in told] == pytest.approx([line[name] for line in lines])


def _records(stored: Path) -> list[dict[str, float]]:
    """What an offline run has of each step."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store, found = DataStore(), []
    store.open_for_scan(str(stored))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    store._fp.close()  # its own close is for one that is written
    return found


@pytest.mark.parametrize("track", [("tensorbord",), ("tensorboard", "tensorbord")])
def test_a_misspelt_tracker_is_named(tmp_path: Path, track: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"track must be one of .*, got 'tensorbord'; did you mean 'tensorboard'"):
        train(TINY, tmp_path / "run", track=track)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ValueError, match="track must name an installed tracker: wandb is not, pip install wandb"):
        train(TINY, tmp_path / "run", track=("wandb",))
    assert not (tmp_path / "run").exists()
    assert "wandb" in distributed.TRACKERS

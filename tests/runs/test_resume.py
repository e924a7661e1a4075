"""Training survives kills, interrupts and full disks, and goes on to the same bits."""

import random
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.tiny import TINY, begin, checkpoints, finish, logged, started, wait_for, weights


def test_killed_runs_end_with_the_same_bits(uninterrupted: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments, and right inside a checkpoint write, then on to the end."""
    folder = tmp_path / "run"
    begin(TINY, folder)
    rng = random.Random(0)
    killed_inside_a_write = 0
    for attempt in range(12):
        process = started(folder)
        before = max(checkpoints(folder), default=0)
        if attempt % 2 == 0:
            # While the folder of a new checkpoint exists under its partial name, it is being written.
            wait_for(lambda: list((folder / "checkpoints").glob("*.partial")), process)
        else:
            wait_for(lambda start=before: max(checkpoints(folder), default=0) > start, process)
            time.sleep(rng.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed_inside_a_write += bool(list((folder / "checkpoints").glob("*.partial")))
        if (killed_inside_a_write and attempt >= 1) or max(checkpoints(folder), default=0) >= 32:
            break
    assert killed_inside_a_write
    assert "going on from" in finish(folder)
    assert weights(folder, 40) == weights(uninterrupted, 40)
    assert logged(folder) == logged(uninterrupted)
    assert not list((folder / "checkpoints").glob("*.partial"))


def test_interrupt_saves_says_how_to_go_on_and_goes_on_exactly(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(replace(TINY, checkpoint_every=1000), folder)
    process = started(folder)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 300, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    (step,) = checkpoints(folder)
    assert f"stopped after {step} of 40 steps and saved a checkpoint; go on with: tra train --resume {folder}" in err
    assert "Traceback" not in err
    finish(folder)
    assert weights(folder, 40)["model.safetensors"] == weights(uninterrupted, 40)["model.safetensors"]
    assert logged(folder) == logged(uninterrupted)


@pytest.mark.parametrize(
    "place, message",
    [
        ("checkpoint", "could not write the checkpoint of step 44"),
        ("metrics", "could not write step 41 to"),
        ("start", "metrics.jsonl"),
        ("environment", "environment.json"),
    ],
)
def test_full_disk_is_reported_and_the_old_checkpoint_stays(
    uninterrupted: Path, tmp_path: Path, place: str, message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    intact = weights(folder, 40)
    (folder / "recipe.json").write_text(replace(TINY, steps=48).to_json())
    metrics = (folder / "metrics.jsonl").stat().st_size
    if place == "start":
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 41')  # must be taken out, by writing the file again
    limit = {"checkpoint": 20_000, "metrics": metrics + 50, "start": metrics - 50, "environment": 300}[place]

    def no_space() -> None:
        # A write beyond the limit fails as it does on a full disk, instead of killing the process.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = started(folder, preexec_fn=no_space)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in err
    assert message in err
    if place in ("checkpoint", "metrics"):
        assert f"the last good checkpoint is {folder}/checkpoints/step-00000040" in err
    assert weights(folder, 40) == intact
    assert checkpoints(folder) == [36, 40]
    assert not list(folder.rglob("*.partial"))

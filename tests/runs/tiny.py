"""A run of a second or two, in this process or in others, and what it leaves on disk."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tra.model import DecoderConfig
from tra.recipes import Recipe

# Dropout is on, so that an exact resume has to get the random numbers right too.
TINY = Recipe(
    name="tiny",
    model=DecoderConfig(vocabulary=6, layers=2, heads=2, width=32, dropout=0.1),
    task="flip_flop",
    length=16,
    steps=40,
    batch=8,
    learning_rate=1e-3,
    log_every=1,
    checkpoint_every=4,
)


def begin(recipe: Recipe, folder: Path) -> None:
    """Lay out a run that has not started, so that a process can --resume it."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(recipe.to_json())


def started(folder: Path, **options: Any) -> "subprocess.Popen[str]":
    """A process that goes on with a run, in one thread."""
    return subprocess.Popen(
        [sys.executable, "-m", "tra", "train", "--resume", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(folder: Path) -> str:
    """Go on with a run to its end; what the process said."""
    process = started(folder)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return out


def wait_for(condition: Callable[[], Any], process: "subprocess.Popen[str]", seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def launched(launcher: list[str], *command: str) -> None:
    """Several processes, each in one thread, run to their end."""
    process = subprocess.run(
        [sys.executable, "-m", *launcher, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-????????"))


def weights(folder: Path, step: int) -> dict[str, bytes]:
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    return {file.name: file.read_bytes() for file in checkpoint.iterdir()}


def logged(folder: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` says, without the speed: the only thing that differs between two equal runs."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [{name: value for name, value in entry.items() if name != "tokens_per_second"} for entry in entries]

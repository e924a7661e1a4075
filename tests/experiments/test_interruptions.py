"""Grids that are stopped, killed and terminated, and go on by the same command to the same results."""

import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.experiments.small import content_of, smoke
from tra.cli import main

STEPS = 500
LONGER = f"""
from dataclasses import replace

from tra.experiments import Experiment
from tra.experiments.table1 import SMOKE
from tra.recipes import Evaluation


def flip_flop(attention="tra"):
    evaluations = (Evaluation("iid", 8, 4), Evaluation("iid", 16, 4))
    return replace(
        SMOKE["flip_flop"](attention=attention), steps={STEPS}, checkpoint_every=100_000, evaluations=evaluations,
    )


experiment = Experiment({{"smoke": {{"flip_flop": flip_flop}}}}, ("tra", "rope"))
"""
"""What a user interrupts takes longer than the four steps of the smoke scale."""

COMMAND = """
import signal, sys
from tra.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def started() -> Iterator[Callable[[Sequence[str]], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that its processes can be found, and get Ctrl-C as from a terminal
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        for number in in_session(process.pid):
            os.kill(number, signal.SIGKILL)
        process.communicate()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes in /proc")
def test_interrupted_and_killed_grids_go_on_by_the_same_command_to_the_same_results(
    tmp_path: Path,
    started: Callable[[Sequence[str]], subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, folder = tmp_path / "longer.py", tmp_path / "interrupted"
    file.write_text(LONGER)
    command = smoke(file, folder, "--jobs", "2")
    threads = torch.get_num_threads()
    runs = [folder / "runs" / "flip_flop" / attention / "0" for attention in ("tra", "rope")]
    message = (
        f"tra: stopped with 0 of 2 runs finished; the others go on from here by: {shlex.join(['tra', *command])}\n"
    )

    process = started(command)
    wait_for_steps(runs, process)
    os.killpg(process.pid, signal.SIGINT)  # in a terminal, Ctrl-C reaches every process at once
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, message)
    wait_for_end(process.pid)
    saved_unfinished(runs)

    process = started(command)
    wait_for_steps(runs, process)
    process.kill()
    process.wait()
    wait_for_end(process.pid)
    saved_unfinished(runs)

    # The rest in this process, which saves the time to start another.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # one for each of two jobs, as above
    with terminated(runs):
        assert main(command) == 130
    assert capsys.readouterr().err == message
    assert multiprocessing.active_children() == []
    saved_unfinished(runs)

    assert main(command) == 0
    assert not list(folder.rglob("failure.txt"))

    whole = tmp_path / "whole"
    torch.set_num_threads(1)
    try:
        assert main(smoke(file, whole, "--jobs", "2")) == 0
    finally:
        torch.set_num_threads(threads)
    assert content_of(whole)["results"] == content_of(folder)["results"]
    assert (whole / "table.csv").read_bytes() == (folder / "table.csv").read_bytes()
    for run in runs:
        metrics = run.relative_to(folder) / "metrics.jsonl"
        assert measured(whole / metrics) == measured(folder / metrics)


def measured(metrics: Path) -> list[dict[str, float]]:
    """All that is logged but how fast it went."""
    entries = map(json.loads, metrics.read_text().splitlines())
    return [{name: value for name, value in entry.items() if name != "tokens_per_second"} for entry in entries]


def steps_of(runs: Sequence[Path]) -> list[int]:
    return [len(file.read_bytes().splitlines()) if (file := run / "metrics.jsonl").exists() else 0 for run in runs]


def wait_for_steps(runs: Sequence[Path], process: subprocess.Popen[str] | None = None) -> None:
    """Until every run has gone on for some steps."""
    before, deadline = steps_of(runs), time.monotonic() + 90
    while any(now < then + 10 for now, then in zip(steps_of(runs), before, strict=True)):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for_end(session: int) -> None:
    deadline = time.monotonic() + 30
    while in_session(session):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def in_session(session: int) -> list[int]:
    """The processes of a session that are running."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, belongs_to = status.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended in the meantime
            continue
        if int(belongs_to) == session and state != "Z":
            found.append(int(status.parent.name))
    return found


def saved_unfinished(runs: Sequence[Path]) -> None:
    """What every run has done is saved, and is not all."""
    for run, steps in zip(runs, steps_of(runs), strict=True):
        assert 10 <= steps < STEPS
        assert (run / "checkpoints" / f"step-{steps:08d}" / "state.json").exists()
        assert not (run / "results.json").exists()


@contextmanager
def terminated(runs: Sequence[Path]) -> Iterator[None]:
    """Send SIGTERM to this process once every run has gone on for some steps."""

    def terminate() -> None:
        wait_for_steps(runs)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # in case that nobody waits for it any more
    watch = threading.Thread(target=terminate)
    watch.start()
    try:
        yield
    finally:
        watch.join()
        signal.signal(signal.SIGTERM, before)

"""A run that is killed at any moment, again and again, ends with the bits of one that never was."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.strategies import TRIED, attack
from tests.runs.tiny import TINY, begin, logged, weights
from tra.progress import hidden
from tra.runs import train


def killed_after(seconds: float, folder: Path) -> bool:
    """Go on with a run in a process that is killed so late; whether it was done before."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's threads are not in a child
        with hidden():
            train(TINY, folder)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(TINY, folder)
    return folder


@attack(2)
@given(st.lists(st.floats(0.02, 1.5), min_size=2, max_size=4))
def test_killed_runs_end_with_the_same_bits(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, moments: list[float]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    begin(TINY, folder)
    for seconds in moments:
        TRIED["kills"] += 1
        if killed_after(seconds, folder):
            break
    assert killed_after(120.0, folder)
    assert weights(folder, TINY.steps) == weights(whole, TINY.steps)
    assert logged(folder) == logged(whole)
    assert not list(folder.rglob("*.partial"))

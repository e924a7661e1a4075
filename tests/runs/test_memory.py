"""Memory that a run uses again."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.runs.tiny import TINY
from tra.runs import train, training
from tra.runs.memory import M_MMAP_THRESHOLD, REUSED

FAULTS = """
import resource
import torch
from tra.runs.memory import reuse_memory

torch.set_num_threads(1)
if {reuses}:
    reuse_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):  # the first touch is always a fault
    torch.zeros({numbers})
before = faults()
for _ in range(10):
    torch.zeros({numbers})
print(faults() - before)
"""


def page_faults(megabytes: int, reuses: bool, environment: Mapping[str, str] | None = None) -> int:
    """Of making a block ten times, each time when the one before it is freed."""
    code = FAULTS.format(reuses=reuses, numbers=megabytes * (1 << 18))
    usual = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**usual, **(environment or {})})
    return int(done.stdout)


NEEDED = "needs an allocator like that of a recent glibc"


def allocator_is_set() -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, REUSED))


def test_training_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(training, "reuse_memory", lambda: asked.append(True))
    train(TINY, tmp_path)
    assert asked == [True]


@pytest.mark.skipif(not allocator_is_set(), reason=NEEDED)
def test_what_the_environment_sets_stays() -> None:
    assert page_faults(megabytes=40, reuses=True, environment={"MALLOC_TOP_PAD_": "0"}) > 150


@pytest.mark.skipif(not allocator_is_set(), reason=NEEDED)
def test_blocks_of_a_step_are_used_again_and_the_largest_go_back() -> None:
    assert page_faults(megabytes=40, reuses=False) > 150  # were every page of 2 MiB
    assert page_faults(megabytes=40, reuses=True) < 50
    assert page_faults(megabytes=80, reuses=True) > 150

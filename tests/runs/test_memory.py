"""Memory that a run uses again."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.runs.tiny import TINY
from tra.cli import main
from tra.runs import train
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


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What glibc's allocator is asked for."""
    asked: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, name: int, value: int) -> int:
            asked.append((name, value))
            return 1

    monkeypatch.setattr("tra.runs.memory.ctypes.CDLL", lambda _: Library())
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    return asked


def test_training_from_python_leaves_the_allocator_alone(tmp_path: Path, settings: list[tuple[int, int]]) -> None:
    train(TINY, tmp_path)
    assert settings == []


@pytest.mark.parametrize("words, changes", [((), True), (("--no-reuse-memory",), False)])
def test_the_command_lets_it_keep_memory_unless_told_not_to(
    words: tuple[str, ...], changes: bool, tmp_path: Path, settings: list[tuple[int, int]]
) -> None:
    run = train(TINY, tmp_path)
    assert main(["train", "--resume", str(run.folder), *words]) == 0
    assert (M_MMAP_THRESHOLD in dict(settings)) == changes


@pytest.mark.skipif(not allocator_is_set(), reason=NEEDED)
def test_what_the_environment_sets_stays() -> None:
    assert page_faults(megabytes=40, reuses=True, environment={"MALLOC_TOP_PAD_": "0"}) > 150


@pytest.mark.skipif(not allocator_is_set(), reason=NEEDED)
def test_blocks_of_a_step_are_used_again_and_the_largest_go_back() -> None:
    assert page_faults(megabytes=40, reuses=False) > 150  # were every page of 2 MiB
    assert page_faults(megabytes=40, reuses=True) < 50
    assert page_faults(megabytes=80, reuses=True) > 150

"""Damaged runs, exported folders and caches: every command ends with a code and one line, and deletes nothing that it
could not read."""

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import tiny
from tests.fuzz.calling import Hangs, ends_well
from tests.fuzz.strategies import TRIED, UNREADABLE, Damage, attack, damages, inflict
from tra.errors import RunError
from tra.runs import train
from tra.runs.training import _Trainer

MOST_STEPS = 5
COMMANDS = {
    "evaluate": lambda run, out: ["evaluate", run, "--examples", "2"],
    "evaluate again": lambda run, out: ["evaluate", run],
    "inspect": lambda run, out: ["inspect", run, "--length", "5", "--output", out],
    "export": lambda run, out: ["export", run, out],
    "train": lambda run, out: ["train", "--resume", run],
    "generate": lambda run, out: ["generate", run, "--prompt", "The", "--tokens", "2"],
}


@pytest.fixture(scope="module")
def unfinished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints that was stopped before it was measured."""
    folder = tmp_path_factory.mktemp("unfinished") / "run"
    train(replace(tiny(), checkpoint_every=1, evaluations=tiny().evaluations[:1]), folder)
    (folder / "results.json").unlink()
    (folder / "failure.txt").write_text("it stopped\n")
    return folder


def stored(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


@contextmanager
def stopping_soon() -> Iterator[None]:
    """A recipe may say a million steps now, and is then trained for some of them only."""
    steps, step = itertools.count(), _Trainer._step

    def some(*arguments: Any) -> Any:
        if next(steps) == MOST_STEPS:
            raise RunError("enough")
        return step(*arguments)

    with mock.patch.object(_Trainer, "_step", some):
        yield


def attacked(template: Path, scratch: Path, damage: Damage, command: str) -> None:
    """Damage a copy, run a command on it, and see what is left."""
    TRIED[f"damaged files, {command.split()[0]}"] += 1
    shutil.rmtree(scratch, ignore_errors=True)
    folder, out = scratch / "run", scratch / "out"
    shutil.copytree(template, folder)
    before = {path: path.read_bytes() for path in stored(folder / "checkpoints")}
    hit = inflict(damage, stored(folder))
    try:
        with stopping_soon():
            ends_well(COMMANDS[command](str(folder), str(out)))
    except Hangs as hangs:
        hangs.add_note(f"{command} after {damage} to {hit.relative_to(folder)}")
        raise
    if damage.how in UNREADABLE:
        # What could not be read is still there, and so is every checkpoint beside it.
        assert os.path.lexists(hit)
        if "checkpoints" in hit.parts:
            assert all(path.read_bytes() == content for path, content in before.items() if path != hit)


@attack(40)
@given(damages(), st.sampled_from(["evaluate", "evaluate again", "export", "train", "train", "generate"]))
def test_a_damaged_run_on_a_task(
    unfinished_run: Path, tmp_path_factory: pytest.TempPathFactory, damage: Damage, command: str
) -> None:
    attacked(unfinished_run, tmp_path_factory.getbasetemp() / "damaged", damage, command)


@attack(25)
@given(damages(), st.sampled_from(["evaluate", "train", "generate", "export", "inspect"]))
def test_a_damaged_run_on_text(
    language_run: Path, tmp_path_factory: pytest.TempPathFactory, damage: Damage, command: str
) -> None:
    attacked(language_run, tmp_path_factory.getbasetemp() / "damaged", damage, command)


@attack(30)
@given(damages())
def test_a_damaged_exported_folder(exported: Path, tmp_path_factory: pytest.TempPathFactory, damage: Damage) -> None:
    attacked(exported, tmp_path_factory.getbasetemp() / "damaged", damage, "generate")


@attack(12)
@given(damages())
def test_a_damaged_cache_is_made_again_or_named(
    language_run: Path, tmp_path_factory: pytest.TempPathFactory, damage: Damage
) -> None:
    TRIED["damaged files, cache"] += 1
    scratch = tmp_path_factory.getbasetemp() / "cache"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(language_run.parent / "cache", scratch)
    hit = inflict(damage, [path for path in stored(scratch) if not path.name.endswith(".lock")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRA_CACHE", str(scratch))
        code = ends_well(["evaluate", str(language_run), "--lengths", "16", "--examples", "2"])
    assert code == 0 or damage.how in UNREADABLE
    assert os.path.lexists(hit) or damage.how == "missing"

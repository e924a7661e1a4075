"""Many runs in one folder: what counts as finished, failures that stop nobody else, and several at a time."""

import io
import itertools
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tra.attention import MECHANISMS
from tra.grid import Cell, run_all
from tra.recipes import Evaluation, Recipe, table1
from tra.tasks import FlipFlop

QUIET = Console(quiet=True)
COLUMNS = table1.smoke()
SMOKE = replace(COLUMNS["flip_flop"], evaluations=(Evaluation("iid", 8, 4), Evaluation("iid", 16, 4)))


def cell(folder: Path, seed: int = 0, kind: type[Cell] = Cell, **changes: Any) -> Cell:
    return kind("flip_flop", replace(SMOKE, seed=seed, **changes), folder / str(seed))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder, and when it was written."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class KilledAtOnce(Cell):
    """As by the kernel when memory is short; runs like any other once `healed` is there."""

    def run(self) -> None:
        if not (self.folder.parent / "healed").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        super().run()


class KilledInside(KilledAtOnce):
    """After its folder was made."""

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        super().run()


class Watched(Cell):
    """Writes down when it ran and with how many threads; seeds 0 and 1 wait for each other."""

    def run(self) -> None:
        start, runs = time.monotonic(), self.folder.parent
        (runs / f"here-{self.recipe.seed}").touch()
        while self.recipe.seed < 2 and not (runs / f"here-{1 - self.recipe.seed}").exists():
            assert time.monotonic() < start + 60
            time.sleep(0.01)
        super().run()
        seen = {"start": start, "stop": time.monotonic(), "threads": torch.get_num_threads()}
        (runs / f"seen-{self.recipe.seed}.json").write_text(json.dumps(seen))


@pytest.fixture
def _cells_of_this_file_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes import this file by its name, from wherever the tests were started."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


@pytest.mark.parametrize("attention", MECHANISMS)
def test_every_mechanism_is_trained_and_measured(tmp_path: Path, attention: str) -> None:
    one = Cell("instructed", _with_attention(COLUMNS["instructed"], attention), tmp_path / "run")
    one.run()
    assert one.failure() is None
    results = one.results()
    assert results is not None
    assert [(result["set"], result["length"]) for result in results] == [
        (entry.name, entry.length) for entry in one.recipe.evaluations
    ]
    for result in results:
        assert 0.0 <= result["exact_match"] <= 1.0
        assert 0.0 <= result["token_accuracy"] <= 1.0
        assert 0.0 < result["loss"] < 20.0  # of 50 symbols by chance it is 3.9


def test_every_column_is_trained_and_measured(tmp_path: Path) -> None:
    for column, recipe in COLUMNS.items():
        one = Cell(column, recipe, tmp_path / column)
        one.run()
        assert one.failure() is None
        assert len(one.results() or []) == len(recipe.evaluations) > 0
        assert one.steps_done() == 4


def test_results_are_those_of_a_finished_run_of_this_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cell(tmp_path)
    assert one.results() is None
    assert one.steps_done() == 0
    one.run()
    found = one.results()
    assert found is not None
    assert [result["length"] for result in found] == [8, 16]
    assert cell(tmp_path, learning_rate=0.5).results() is None
    assert cell(tmp_path, model=replace(SMOKE.model, width=32)).results() is None
    with monkeypatch.context() as patch:
        patch.setattr(FlipFlop, "version", FlipFlop.version + 1)
        assert one.results() is None
    assert one.results() == found

    stored = one.folder / "results.json"
    whole = stored.read_text()
    stored.write_text(json.dumps({**json.loads(whole), "step": 3}))
    assert one.results() is None
    stored.unlink()
    assert one.results() is None
    stored.write_text(whole)
    (one.folder / "recipe.json").write_text("{")
    assert one.results() is None
    (one.folder / "recipe.json").unlink()
    assert one.results() is None


@pytest.mark.parametrize("damage", ["", '{"step": 4, "resul', "{}", "[]", "null"])
def test_a_damaged_results_file_is_a_run_that_is_not_finished(tmp_path: Path, damage: str) -> None:
    one = cell(tmp_path)
    one.folder.mkdir()
    (one.folder / "recipe.json").write_text(one.recipe.to_json())
    (one.folder / "results.json").write_text(damage)
    assert one.results() is None


@pytest.mark.usefixtures("_cells_of_this_file_can_be_sent")
def test_failures_are_written_down_stop_nobody_and_are_tried_again(tmp_path: Path) -> None:
    stranger = cell(tmp_path, 1)
    stranger.folder.mkdir()
    (stranger.folder / "recipe.json").write_text(replace(stranger.recipe, batch=2).to_json())
    cells = [cell(tmp_path, 0), stranger, cell(tmp_path, 2, KilledInside), cell(tmp_path, 3)]
    console, before = Console(file=io.StringIO(), width=500), signal.getsignal(signal.SIGTERM)
    run_all(cells, 2, console)
    assert signal.getsignal(signal.SIGTERM) == before
    reasons = [
        None,
        f"folder {stranger.folder} holds a run of another recipe: batch differ",
        "the process ended with signal 9",
        None,
    ]
    assert [one.failure() for one in cells] == reasons
    assert [one.results() is not None for one in cells] == [True, False, False, True]
    shown = text_of(console)
    for one, reason in zip(cells, reasons, strict=True):
        outcome = rf"failed: {re.escape(reason)}" if reason else r"iid@8 \d\.\d\d  iid@16 \d\.\d\d \(\d+ s\)"
        assert len(re.findall(f"^{one.label}: {outcome}$", shown, re.MULTILINE)) == 1, shown
    assert cells[3].label == "flip_flop tra seed 3"

    (tmp_path / "healed").touch()
    (stranger.folder / "recipe.json").write_text(stranger.recipe.to_json())
    finished = contents(cells[0].folder)
    console = Console(file=io.StringIO(), width=500)
    run_all(cells, 1, console)
    assert all(one.results() is not None and one.failure() is None for one in cells)
    assert not list(tmp_path.rglob("failure.txt"))
    assert contents(cells[0].folder) == finished
    assert "2 of 4 runs are finished already" in text_of(console)
    everything = contents(tmp_path)
    run_all(cells, 1, console)
    assert contents(tmp_path) == everything


@pytest.mark.usefixtures("_cells_of_this_file_can_be_sent")
def test_a_process_killed_before_it_made_its_folder_stops_nobody(tmp_path: Path) -> None:
    cells = [cell(tmp_path, 0, KilledAtOnce), cell(tmp_path, 1)]
    run_all(cells, 1, QUIET)
    assert [one.failure() for one in cells] == ["the process ended with signal 9", None]
    assert cells[1].results() is not None


@pytest.mark.usefixtures("_cells_of_this_file_can_be_sent")
def test_jobs_run_at_the_same_time_share_the_threads_and_are_shown_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tra.progress.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("tra.grid.SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    console = Console(file=io.StringIO(), width=200)
    cells = [cell(tmp_path, seed, Watched) for seed in range(4)]
    run_all(cells, 2, console)
    assert all(one.results() is not None for one in cells)
    seen = [json.loads((tmp_path / f"seen-{seed}.json").read_text()) for seed in range(4)]
    assert [entry["threads"] for entry in seen] == [3] * 4
    changes = sorted(itertools.chain(*([(entry["start"], 1), (entry["stop"], -1)] for entry in seen)))
    at_a_time = list(itertools.accumulate(change for _, change in changes))
    assert max(at_a_time) == 2

    lines = [line for line in text_of(console).splitlines() if line.startswith("4 runs: ")]
    shown = [re.match(r"4 runs: step (\d+)/16, running (\d), waiting (\d)(.*)$", line) for line in lines]
    assert all(shown), lines
    counts = [(int(match[2]), int(match[3])) for match in shown if match]
    assert (2, 2) in counts
    assert counts[-1] == (0, 0)
    assert all(running <= 2 for running, _ in counts)
    done = [int(match[1]) for match in shown if match]
    assert done == sorted(done)
    assert done[-1] == 16
    assert any(re.fullmatch(r", [\d.e+]+ steps/s, \d+ s left", match[4]) for match in shown if match)


def _with_attention(recipe: Recipe, attention: str) -> Recipe:
    return replace(recipe, model=replace(recipe.model, attention=attention))

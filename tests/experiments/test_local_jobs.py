"""Many runs in one folder: what counts as finished, failures that stop nobody else, and several at a time."""

import io
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.cli.calling import without_plugins
from tests.experiments.small import files_below, flip_flop
from tra import plugins
from tra.attention import MECHANISMS
from tra.experiments.cells import Cell
from tra.experiments.local_jobs import gpus, run_all, run_cell, unfinished
from tra.experiments.table1 import SMOKE
from tra.progress import shown
from tra.recipes import Recipe
from tra.tasks import ExactMatch, FlipFlop

TROUBLED = '''
"""Tasks with which things go wrong, each in a place of its own."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tra.tasks import FlipFlop


@dataclass(frozen=True)
class Killed(FlipFlop):
    """As by the kernel when memory is short; learned like any other once `healed` is there."""

    name = "killed"
    place: str = ""

    def prepare(self, *arguments):
        self.die("at once")

    def score(self, evaluation, predictions):
        self.die("inside")
        return super().score(evaluation, predictions)

    def die(self, when):
        place = Path(self.place)
        if place.name == when and not (place.parent / "healed").exists():
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Watched(FlipFlop):
    """Writes down when and where it was learned and with how many threads; 0 and 1 wait for each other."""

    name = "watched"
    place: str = ""

    def prepare(self, *arguments):
        place = Path(self.place)
        start, number = time.monotonic(), int(place.name)
        (place.parent / f"here-{number}").touch()
        while number < 2 and not (place.parent / f"here-{1 - number}").exists():
            assert time.monotonic() < start + 60
            time.sleep(0.01)
        self.write("start", start)

    def score(self, evaluation, predictions):
        self.write("stop", time.monotonic())
        return super().score(evaluation, predictions)

    def write(self, what, when):
        place = Path(self.place)
        seen = {what: when, "threads": torch.get_num_threads(), "device": os.environ.get("CUDA_VISIBLE_DEVICES")}
        (place.parent / f"{what}-{place.name}.json").write_text(json.dumps(seen))


TASKS = {"killed": Killed, "watched": Watched}
'''


def load_troubled(folder: Path) -> None:
    (folder / "troubled.py").write_text(TROUBLED)
    plugins.load(str(folder / "troubled.py"))


@pytest.fixture
def troubled(tmp_path: Path) -> None:
    load_troubled(tmp_path)


def cell(folder: Path, seed: int = 0, **changes: Any) -> Cell:
    return Cell("flip_flop", "tra", replace(flip_flop(), seed=seed, **changes), folder / str(seed))


def console() -> Console:
    return Console(file=io.StringIO(), width=500)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def check_measured(one: Cell) -> None:
    assert one.run.failure() is None
    results = one.results()
    assert results is not None
    assert [(result.set, result.length) for result in results] == [
        (entry.name, entry.length) for entry in one.recipe.evaluations
    ]
    assert results
    for result in results:
        assert isinstance(result, ExactMatch)
        assert 0.0 <= result.exact_match <= 1.0
        assert 0.0 <= result.token_accuracy <= 1.0
        assert 0.0 < result.loss < 20.0  # of 50 symbols by chance it is 3.9
    assert one.run.steps_done() == 4


@pytest.mark.parametrize("attention", MECHANISMS)
def test_every_mechanism_is_trained_and_measured(tmp_path: Path, attention: str) -> None:
    one = Cell("instructed", attention, SMOKE["instructed"](attention=attention), tmp_path / "run")
    run_cell(one)
    check_measured(one)


@pytest.mark.parametrize("column", SMOKE)
def test_every_column_is_trained_and_measured(tmp_path: Path, column: str) -> None:
    one = Cell(column, "tra", SMOKE[column](), tmp_path / column)
    run_cell(one)
    check_measured(one)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    one = cell(tmp_path_factory.mktemp("trained"))
    assert one.results() is None
    assert one.run.steps_done() == 0
    run_cell(one)
    return one


@pytest.fixture
def finished(trained: Cell, tmp_path: Path) -> Cell:
    """A copy, to be changed."""
    shutil.copytree(trained.folder, tmp_path / "0")
    return cell(tmp_path)


def test_results_are_those_of_a_finished_run(finished: Cell) -> None:
    assert [result.length for result in finished.results() or []] == [8, 16]


@pytest.mark.parametrize("change", [{"learning_rate": 0.5}, {"model": replace(flip_flop().model, width=32)}])
def test_another_recipe_has_no_results_there(finished: Cell, change: dict[str, Any]) -> None:
    assert cell(finished.folder.parent, **change).results() is None


def test_results_are_of_the_tasks_version(finished: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlipFlop, "version", FlipFlop.version + 1)
    assert finished.results() is None


def test_results_before_the_last_step_do_not_count(finished: Cell) -> None:
    stored = finished.folder / "results.json"
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "step": 3}))
    assert finished.results() is None


@pytest.mark.parametrize("name, damage", [("results.json", None), ("recipe.json", "{"), ("recipe.json", None)])
def test_a_run_whose_files_are_gone_or_damaged_has_no_results(finished: Cell, name: str, damage: str | None) -> None:
    (finished.folder / name).unlink()
    if damage is not None:
        (finished.folder / name).write_text(damage)
    assert finished.results() is None


def test_a_run_of_a_plugin_that_is_not_loaded_is_not_a_run_of_this_recipe(tmp_path: Path) -> None:
    one = cell(tmp_path)
    run_cell(one)
    stored = one.folder / "recipe.json"
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "plugins": ["somebody_elses"]}))
    assert one.results() is None
    assert "the plug-in somebody_elses is needed and not loaded" in (one.read()[1] or "")
    console = Console(file=io.StringIO(), width=500)
    with shown(console):
        assert unfinished([one]) == [one]
    assert f"{one.label}: {one.read()[1]}" in console.file.getvalue()
    run_cell(one)
    assert "the plug-in somebody_elses is needed and not loaded" in (one.run.failure() or "")


@pytest.mark.parametrize("damage", ["", '{"step": 4, "resul', "{}", "[]", "null"])
def test_a_damaged_results_file_is_a_run_that_is_not_finished(tmp_path: Path, damage: str) -> None:
    one = cell(tmp_path)
    one.folder.mkdir()
    (one.folder / "recipe.json").write_text(one.recipe.to_json())
    (one.folder / "results.json").write_text(damage)
    assert one.results() is None


def killed(folder: Path, seed: int, when: str) -> Cell:
    return cell(folder, seed, task="killed", task_options={"place": str(folder / when)})


@pytest.mark.usefixtures("troubled")
def test_failures_are_written_down_stop_nobody_and_are_tried_again(tmp_path: Path) -> None:
    stranger = cell(tmp_path, 1)
    stranger.folder.mkdir()
    (stranger.folder / "recipe.json").write_text(replace(stranger.recipe, batch=2).to_json())
    cells = [cell(tmp_path, 0), stranger, killed(tmp_path, 2, "inside"), cell(tmp_path, 3)]
    screen, before = console(), signal.getsignal(signal.SIGTERM)
    with shown(screen):
        run_all(cells, 2)
    assert signal.getsignal(signal.SIGTERM) == before
    reasons = [
        None,
        f"folder {stranger.folder} holds a run of another recipe, with other values of batch (2, now 4)",
        "the process ended with signal 9",
        None,
    ]
    assert [one.run.failure() for one in cells] == reasons
    assert [one.results() is not None for one in cells] == [True, False, False, True]
    for one, reason in zip(cells, reasons, strict=True):
        outcome = rf"failed: {re.escape(reason)}" if reason else r"iid@8 \d\.\d\d  iid@16 \d\.\d\d \(\d+ s\)"
        assert len(re.findall(f"^{one.label}: {outcome}$", text_of(screen), re.MULTILINE)) == 1, text_of(screen)
    assert cells[3].label == "flip_flop tra seed 3"

    (tmp_path / "healed").touch()
    (stranger.folder / "recipe.json").write_text(stranger.recipe.to_json())
    finished = files_below(cells[0].folder)
    screen = console()
    with shown(screen):
        run_all(unfinished(cells), 1)
    assert all(one.results() is not None and one.run.failure() is None for one in cells)
    assert not list(tmp_path.rglob("failure.txt"))
    assert files_below(cells[0].folder) == finished
    assert "2 of 4 runs are finished already" in text_of(screen)
    assert unfinished(cells) == []


@pytest.mark.usefixtures("troubled")
def test_a_process_killed_before_it_made_its_folder_stops_nobody(tmp_path: Path) -> None:
    cells = [killed(tmp_path, 0, "at once"), cell(tmp_path, 1)]
    run_all(cells, 1)
    assert [one.run.failure() for one in cells] == ["the process ended with signal 9", None]
    assert cells[1].results() is not None


@pytest.mark.parametrize(
    "count, visible, devices",
    [
        (0, None, [""]),
        (2, None, ["0", "1"]),
        (8, "GPU-5ab3,MIG-77", ["GPU-5ab3", "MIG-77"]),  # what a scheduler leaves of eight
        (8, "", [""]),
    ],
)
def test_gpus_are_those_that_may_be_seen(
    monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, devices: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus() == devices


@dataclass(frozen=True)
class Jobs:
    """Four runs, two at a time: what each saw, and what the console was told."""

    seen: list[dict[str, Any]]
    lines: list[str]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder, screen = tmp_path_factory.mktemp("jobs"), console()
    with without_plugins(), pytest.MonkeyPatch.context() as patch, shown(screen):
        load_troubled(folder)
        cells = [cell(folder, n, task="watched", task_options={"place": str(folder / str(n))}) for n in range(4)]
        patch.setattr("tra.progress.SECONDS_BETWEEN_LINES", 0.0)
        patch.setattr("tra.experiments.local_jobs.SECONDS_BETWEEN_LOOKS", 0.05)
        patch.setattr(torch, "get_num_threads", lambda: 6)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setattr(torch.cuda, "device_count", lambda: 3)
        run_all(cells, 2)
        assert all(one.results() is not None for one in cells)
    seen: list[dict[str, Any]] = [{} for _ in cells]
    for seed, what in itertools.product(range(4), ("start", "stop")):
        seen[seed] |= json.loads((folder / f"{what}-{seed}.json").read_text())
    return Jobs(seen, [line for line in text_of(screen).splitlines() if line.startswith("4 runs: ")])


def test_jobs_share_threads_and_gpus(jobs: Jobs) -> None:
    assert [entry["threads"] for entry in jobs.seen] == [3] * 4
    assert {entry["device"] for entry in jobs.seen[:2]} == {"0", "1"} == {entry["device"] for entry in jobs.seen}


def test_so_many_jobs_run_at_a_time(jobs: Jobs) -> None:
    changes = sorted(itertools.chain(*([(entry["start"], 1), (entry["stop"], -1)] for entry in jobs.seen)))
    assert max(itertools.accumulate(change for _, change in changes)) == 2


def test_one_line_tells_of_all_jobs(jobs: Jobs) -> None:
    shape = r"4 runs: step (\d+)/16, training (\d), measuring (\d), waiting (\d)(.*)$"
    told = [match for line in jobs.lines if (match := re.match(shape, line))]
    assert len(told) == len(jobs.lines), jobs.lines
    counts = [(int(match[2]) + int(match[3]), int(match[4])) for match in told]
    assert (2, 2) in counts
    assert counts[-1] == (0, 0)
    assert all(running <= 2 for running, _ in counts)
    done = [int(match[1]) for match in told]
    assert done == sorted(done)
    assert done[-1] == 16
    assert any(re.fullmatch(r", [\d.e+]+ steps/s, \d+ s left", match[5]) for match in told)


def test_nothing_is_said_unless_somebody_looks_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_all([cell(tmp_path)], 1)
    assert capsys.readouterr() == ("", "")


def test_what_another_process_has_finished_meanwhile_is_not_trained_again(tmp_path: Path) -> None:
    """A run of tuning keeps no checkpoint, so that training would begin anew."""
    one = replace(cell(tmp_path), choice={"learning_rate": 1e-3})
    run_cell(one)
    before, console = files_below(tmp_path), Console(file=io.StringIO(), width=200)
    with shown(console):
        run_all([one], 1)
    assert files_below(tmp_path) == before
    assert f"{one.label}: finished by another process\n" in console.file.getvalue()


def test_a_failure_of_an_unexpected_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(recipe: Recipe, folder: Path) -> None:
        raise KeyError("missing")

    monkeypatch.setattr("tra.experiments.local_jobs.train", broken)
    one = cell(tmp_path)
    run_cell(one)
    assert one.run.failure() == "KeyError: 'missing'"
    first, blank, *details = (one.folder / "failure.txt").read_text().splitlines()
    assert (first, blank, details[0]) == ("KeyError: 'missing'", "", "Traceback (most recent call last):")
    assert any("in broken" in line for line in details)


SCRIPT = """
import sys
from pathlib import Path

with open("began", "a") as file:
    file.write("x")

from tra.experiments import Experiment, reproduce
from tra.recipes import build_recipe


def quick(attention="tra"):
    changes = {"steps": 2, "length": 16, "evaluations": (), "model.width": 16}
    return build_recipe("flip-flop-small", attention).changed(changes)


experiment = Experiment({"small": {"flip_flop": quick}}, ("tra",))
try:
    reproduce(experiment, "out")
except Exception as error:
    print(error)
print((Path("out") / "runs/flip_flop/tra/0/metrics.jsonl").read_text().count("step"))
"""


def test_a_script_without_a_guard_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["1"], done.stdout + done.stderr
    assert (tmp_path / "began").read_text() == "x"


def small_cell(folder: Path) -> Cell:
    return Cell("flip_flop", "tra", flip_flop(), folder)


def test_a_grid_may_run_in_a_thread(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            run_all([small_cell(tmp_path / "run")], 1)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert small_cell(tmp_path / "run").results() is not None

"""`tra reproduce`: grids that are interrupted, shared and taken up again, and what is made from them."""

import csv
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

import tra.reproduce
from tests.text.reading import prose, write_folder
from tra.attention import MECHANISMS
from tra.cli import main
from tra.errors import Interrupted
from tra.grid import Cell
from tra.recipes import Evaluation, Recipe, figure1, figure2, table1, tuning
from tra.reproduce import FIGURE3_TEXT, REPRODUCTIONS, best_rates, cells_of, part_of, tuning_losses

PNG = b"\x89PNG"


def two_columns() -> dict[str, Recipe]:
    """Of the smoke scale: a task whose length is in tokens, and one with several sets and their union."""
    columns = SMOKE()
    sets = {"flip_flop": ("iid", "dense"), "instructed": ("all", "copy")}
    return {
        name: replace(
            columns[name], evaluations=tuple(Evaluation(entry, length, 4) for length in (8, 16) for entry in entries)
        )
        for name, entries in sets.items()
    }


SMOKE = table1.smoke


@pytest.fixture
def two_column_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table1, "smoke", two_columns)


def run_in_this_process(cells: Sequence[Cell], jobs: int = 1, console: Console | None = None) -> None:
    """In place of processes of their own, which take seconds to start."""
    for cell in cells:
        if cell.results() is None:
            cell.run()


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> list[list[Cell]]:
    """Run in this process; gives what was to be run."""
    asked: list[list[Cell]] = []

    def run_all(cells: Sequence[Cell], jobs: int, console: Console) -> None:
        asked.append([cell for cell in cells if cell.results() is None])
        run_in_this_process(cells)

    monkeypatch.setattr(tra.reproduce, "run_all", run_all)
    return asked


def smoke(name: str, folder: Path, *options: str) -> list[str]:
    return ["reproduce", name, "--scale", "smoke", "--output", str(folder), *options]


def content_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def files_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file, and when it was written."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.usefixtures("two_column_grid")
def test_grid_is_run_once_reported_with_its_failures_and_rebuilt_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "grid"
    command = smoke("table1", folder, "--seeds", "2", "--attention", "tra,rope", "--jobs", "2")
    with monkeypatch.context() as patch:
        patch.setattr(tra.reproduce, "run_all", run_in_this_process)
        assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == str(folder)
    assert shown.err == ""
    runs = {
        f"{column}/{attention}/{seed}"
        for column in ("flip_flop", "instructed")
        for attention in ("tra", "rope")
        for seed in range(2)
    }
    assert {str(path.parent.relative_to(folder / "runs")) for path in folder.rglob("recipe.json")} == runs
    made = {path.name for path in folder.iterdir() if path.is_file() and path.name != ".lock"}
    assert made == {"table.md", "table.csv", "results.json", "accuracy-flip_flop.png", "accuracy-instructed.png"}
    content = content_of(folder)
    assert [(session["command"], session["trained"]) for session in content["sessions"]] == [
        (shlex.join(["tra", *command]), 8)
    ]
    assert (content["runs"], content["finished"], content["failures"]) == (8, 8, {})
    # Two columns with two sets each at two lengths, of two mechanisms with two seeds.
    assert len(content["results"]) == 32
    for row in content["results"]:
        stored = content_of(folder / "runs" / row["column"] / row["attention"] / str(row["seed"]))["results"]
        assert {key: row[key] for key in stored[0]} in stored
    table = (folder / "table.md").read_text()
    assert table in shown.out
    assert "| attention | flip_flop iid | flip_flop dense | instructed |" in table
    assert table.count("\n| tra |") == table.count("\n| rope |") == 4
    with open(folder / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 16
    assert {line["seeds"] for line in lines} == {"2"}

    # Again: nothing to do, and how it was measured stays.
    before = files_below(folder / "runs")
    first = {name: (folder / name).read_bytes() for name in made}
    assert main(command) == 0
    assert "8 of 8 runs are finished already" in capsys.readouterr().out
    assert files_below(folder / "runs") == before
    assert {name: (folder / name).read_bytes() for name in made if "png" not in name} == {
        name: content for name, content in first.items() if "png" not in name
    }

    # All of it from what is stored, though a third seed is asked for that was never run.
    for name in made:
        (folder / name).unlink()
    assert main([*command, "--seeds", "3", "--no-train"]) == 0
    assert files_below(folder / "runs") == before
    assert {path.name for path in folder.iterdir() if path.is_file()} == made | {".lock"}
    for name in ("table.md", "table.csv"):
        assert (folder / name).read_bytes() == first[name]
    assert all((folder / name).read_bytes().startswith(PNG) for name in made if name.endswith(".png"))
    content = content_of(folder)
    assert (content["runs"], content["finished"], content["sessions"]) == (12, 8, [])

    # The third seed, one of whose folders holds something else.
    stranger = folder / "runs" / "flip_flop" / "rope" / "2"
    stranger.mkdir(parents=True)
    (stranger / "recipe.json").write_text(replace(two_columns()["flip_flop"], batch=2).to_json())
    capsys.readouterr()
    assert main([*command, "--seeds", "3"]) == 1
    shown = capsys.readouterr()
    reason = f"folder {stranger} holds a run of another recipe: batch, model, seed differ"
    assert shown.err == f"tra: flip_flop rope seed 2 failed: {reason}\n"
    assert shown.out.splitlines()[-1] == str(folder)
    content = content_of(folder)
    assert (content["runs"], content["finished"], content["sessions"][0]["trained"]) == (12, 11, 3)
    assert content["failures"] == {"flip_flop rope seed 2": reason}
    assert {name: entry for name, entry in files_below(folder / "runs").items() if name in before} == before


@pytest.mark.usefixtures("run_here")
def test_a_failure_is_one_too_for_a_program_that_reads_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = tmp_path / "runs" / "flip_flop" / "fot" / "0"
    stranger.mkdir(parents=True)
    (stranger / "recipe.json").write_text(SMOKE()["flip_flop"].to_json())
    code = main(smoke("figure1", tmp_path, "--seeds", "1", "--json"))
    shown = capsys.readouterr()
    reason = f"folder {stranger} holds a run of another recipe: model differ"
    assert json.loads(shown.out)["failures"] == {"flip_flop fot seed 0": reason}
    assert shown.err == f"tra: flip_flop fot seed 0 failed: {reason}\n"
    assert code == 1


def test_nothing_finished_is_said_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_here: list[list[Cell]]
) -> None:
    assert main(smoke("tuning", tmp_path / "new", "--no-train")) == 1
    assert capsys.readouterr().err == f"tra: error: no run in {tmp_path / 'new'} is finished\n"
    assert run_here == []
    one = tmp_path / "runs" / "flip_flop" / "tra" / "0"
    one.mkdir(parents=True)
    (one / "recipe.json").write_text("{}")
    assert main(smoke("figure1", tmp_path, "--attention", "tra", "--seeds", "1")) == 1
    assert f"no run in {tmp_path} is finished: " in capsys.readouterr().err


@pytest.mark.usefixtures("two_column_grid")
def test_shards_divide_the_runs_among_them(
    tmp_path: Path, run_here: list[list[Cell]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shared"
    command = smoke("table1", folder, "--seeds", "1", "--attention", "tra,rope,nope")
    everything = cells_of(REPRODUCTIONS["table1"], folder, "smoke", 1, ["tra", "rope", "nope"])
    assert main([*command, "--shard", "1/2"]) == 0
    content = content_of(folder)
    assert (content["runs"], content["finished"]) == (6, 3)
    assert main([*command, "--shard", "2/2"]) == 0
    content = content_of(folder)
    assert (content["runs"], content["finished"]) == (6, 6)
    assert [session["trained"] for session in content["sessions"]] == [3, 3]
    first, second = ({cell.folder for cell in cells} for cells in run_here)
    assert not first & second
    assert first | second == {cell.folder for cell in everything}
    # A machine that never answers costs no mechanism its whole row.
    for part in (1, 2, 3):
        assert len({cell.recipe.model.attention for cell in part_of(everything, part, 3)}) == 2
    assert len(content["results"]) == 24
    capsys.readouterr()
    shared = (folder / "table.md").read_text()
    assert main(command) == 0
    assert run_here[2] == []
    assert (folder / "table.md").read_text() == shared


# What a user interrupts takes longer than the four steps of the smoke scale.
LONGER = replace(SMOKE()["flip_flop"], steps=500, checkpoint_every=100_000)
INTERRUPTIBLE = """
import signal, sys
from tra.cli import main
from tra.recipes import Recipe, table1
recipe = Recipe.from_json(sys.argv[1])
table1.smoke = lambda: {"flip_flop": recipe}
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def started() -> Iterator[Callable[[Sequence[str]], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, LONGER.to_json(), *command],
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
    folder = tmp_path / "interrupted"
    command = smoke("table1", folder, "--seeds", "1", "--attention", "tra,rope", "--jobs", "2")
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
    monkeypatch.setattr(table1, "smoke", lambda: {"flip_flop": LONGER})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # one for each of two jobs, as above
    with terminated(runs):
        assert main(command) == 130
    assert capsys.readouterr().err == message
    assert multiprocessing.active_children() == []
    saved_unfinished(runs)

    assert main(command) == 0
    assert not list(folder.rglob("failure.txt"))

    whole = tmp_path / "whole"
    monkeypatch.setattr(tra.reproduce, "run_all", run_in_this_process)
    torch.set_num_threads(1)
    try:
        assert main(smoke("table1", whole, "--seeds", "1", "--attention", "tra,rope")) == 0
    finally:
        torch.set_num_threads(threads)
    assert content_of(whole)["results"] == content_of(folder)["results"]
    assert (whole / "table.csv").read_bytes() == (folder / "table.csv").read_bytes()
    for run in runs:
        metrics = run.relative_to(folder) / "metrics.jsonl"
        assert (whole / metrics).read_bytes() == (folder / metrics).read_bytes()


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
        assert 10 <= steps < LONGER.steps
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


def test_the_command_to_go_on_with_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise Interrupted("stopped")

    monkeypatch.setattr(tra.reproduce, "run_all", interrupted)
    command = smoke("tuning", tmp_path / "my runs")
    assert main(command) == 130
    err = capsys.readouterr().err
    assert err.startswith("tra: stopped by: tra reproduce ")
    assert shlex.split(err.removeprefix("tra: stopped by: ")) == ["tra", *command]


@pytest.mark.usefixtures("run_here")
def test_figure1_shows_tra_beside_fot(tmp_path: Path, drawn: list[Figure]) -> None:
    assert main(smoke("figure1", tmp_path, "--seeds", "1")) == 0
    assert (tmp_path / "attention.png").read_bytes().startswith(PNG)
    (figure,) = drawn
    titles = [panel.get_title() for panel in figure.axes if panel.images]
    assert titles == [f"{name}, layer 1, head {head}" for name in ("tra", "fot") for head in (1, 2)]
    assert all(panel.images[0].get_array().shape == (32, 32) for panel in figure.axes if panel.images)
    content = content_of(tmp_path)
    assert (content["runs"], content["finished"]) == (2, 2)
    assert not (tmp_path / "table.md").exists()


@pytest.mark.usefixtures("run_here")
def test_figure1_is_drawn_from_another_seed_while_the_first_is_not_finished(
    tmp_path: Path, drawn: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    """As on the machine that runs the second shard."""
    assert main(smoke("figure1", tmp_path, "--seeds", "2", "--attention", "tra", "--shard", "2/2")) == 0
    assert capsys.readouterr().err == ""
    assert [panel.get_title() for panel in drawn[0].axes if panel.images] == [f"tra, layer 1, head {i}" for i in (1, 2)]


@pytest.fixture
def small_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the smoke scale of figure2 reads, in a few kilobytes."""
    write_folder(tmp_path / "data" / "wikitext-2", prose(1, 800))
    write_folder(tmp_path / "data" / "wikitext-103", "", prose(2, 300))
    monkeypatch.setenv("TRA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


@pytest.mark.usefixtures("small_texts", "run_here")
def test_figure3_in_the_folder_of_figure2_trains_nothing_and_spoils_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "figure"
    assert main(smoke("figure2", folder, "--seeds", "1", "--attention", "tra,rope")) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    capsys.readouterr()
    assert main(smoke("figure3", folder)) == 0
    heads = (folder / "heads.md").read_text()
    assert heads in capsys.readouterr().out
    assert len(heads.splitlines()) == 2 + 2 * 2
    assert {path: path.read_bytes() for path in before} == before
    assert "".join(json.loads((folder / "heads.json").read_text())["tokens"]) == FIGURE3_TEXT
    assert json.loads((folder / "figure3.json").read_text())["sessions"] == []
    assert (folder / "attention.png").read_bytes().startswith(PNG)


@pytest.mark.usefixtures("small_texts")
def test_figure2_ends_in_tables_of_perplexity_and_a_figure(
    tmp_path: Path, drawn: list[Figure], run_here: list[list[Cell]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "figure"
    command = smoke("figure2", folder, "--seeds", "2", "--attention", "tra,rope")
    assert main(command) == 0
    table = (folder / "table.md").read_text()
    shown = capsys.readouterr().out
    assert table in shown
    assert shown.splitlines()[-1] == str(folder)
    made = {path.name for path in folder.iterdir() if path.is_file() and path.name != ".lock"}
    assert made == {"table.md", "table.csv", "perplexity.png", "results.json"}
    assert (folder / "perplexity.png").read_bytes().startswith(PNG)

    # Three windows, of two mechanisms with two seeds.
    content = content_of(folder)
    rows = content["results"]
    assert (content["runs"], content["finished"], len(rows)) == (4, 4, 12)
    assert {(row["length"], row["stride"]) for row in rows} == {(16, None), (32, None), (32, 8)}
    assert {row["tokens"] for row in rows} == {128}
    assert content["recipes"]["wikitext103"]["text"]["evaluation"] == "wikitext-103"

    def means(measure: str, length: int, stride: int | None) -> dict[str, float]:
        mine = [row for row in rows if (row["length"], row["stride"]) == (length, stride)]
        return {name: sum(row[measure] for row in mine if row["attention"] == name) / 2 for name in ("tra", "rope")}

    parts = table.split("## ")[1:]
    assert [part.splitlines()[0] for part in parts] == [
        f"Perplexity per {unit}, valid, {how}"
        for unit in ("token", "word", "byte")
        for how in ("windows side by side", "sliding windows")
    ]
    for part, measure in zip(parts[::2], ("perplexity", "perplexity_per_word", "perplexity_per_byte"), strict=True):
        assert part.splitlines()[2] == "| attention | 16 | 32 |"
        cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in part.splitlines()[4:6]}
        for column, length in enumerate((16, 32)):
            expected = means(measure, length, None)
            lowest = min(expected.values())
            for name, mean in expected.items():
                text = cells[name][column]
                assert text.startswith("**") == (round(mean, 4) == round(lowest, 4))
                assert float(text.strip("*").split(" ± ")[0]) == pytest.approx(mean, abs=0.006)
    assert "| attention | 32 by 8 |" in parts[1]

    with open(folder / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 6
    for line in lines:
        expected = means("perplexity", int(line["length"]), 8 if "stride 8" in line["set"] else None)
        assert float(line["mean"]) == pytest.approx(expected[line["attention"]], abs=1e-5)

    windows, positions = drawn[-1].axes
    assert [line.get_label() for line in windows.lines] == ["tra", "rope"]
    assert [line.get_xdata().tolist() for line in windows.lines] == [[16, 32]] * 2
    assert [line.get_xdata().tolist() for line in positions.lines] == [[2, 4, 8, 16, 32]] * 2
    for line in windows.lines:
        expected = [means("perplexity", length, None)[str(line.get_label())] for length in (16, 32)]
        assert line.get_ydata().tolist() == pytest.approx(expected)

    # All of it from what is stored.
    before, first = files_below(folder / "runs"), {name: (folder / name).read_bytes() for name in made}
    for name in made:
        (folder / name).unlink()
    assert main([*command, "--no-train"]) == 0
    assert len(run_here) == 1
    assert files_below(folder / "runs") == before
    for name in ("table.md", "table.csv"):
        assert (folder / name).read_bytes() == first[name]
    assert (folder / "perplexity.png").read_bytes().startswith(PNG)
    assert content_of(folder)["results"] == rows


@pytest.mark.usefixtures("run_here")
def test_figure2_without_its_text_says_what_is_missing(
    tmp_path: Path, small_texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_texts / "wikitext-103" / "valid.txt").unlink()
    assert main(smoke("figure2", tmp_path / "figure", "--seeds", "1", "--attention", "tra")) == 1
    error = capsys.readouterr().err
    assert f"is finished: text must hold a valid split: no file in {small_texts / 'wikitext-103'} ends in .txt" in error
    assert error.count("\n") == 1


def test_figure2_compares_six_mechanisms_on_the_same_windows(tmp_path: Path) -> None:
    assert REPRODUCTIONS["figure2"].attention == ("tra", "rope", "nope", "alibi", "fot", "cope")
    for scale in ("paper", "small", "smoke"):
        (usual,) = getattr(figure2, scale)().values()
        cells = cells_of(REPRODUCTIONS["figure2"], tmp_path, scale, 2, REPRODUCTIONS["figure2"].attention)
        assert len({cell.folder for cell in cells}) == len(cells) == 12
        assert {replace(cell.recipe, seed=0, model=usual.model) for cell in cells} == {usual}


def test_tuned_learning_rates_are_those_of_the_small_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates(name: str, scale: str) -> dict[tuple[str, str], float]:
        cells = cells_of(REPRODUCTIONS[name], tmp_path, scale, 1, ["tra", "rope"])
        return {(cell.column, cell.recipe.model.attention): cell.recipe.learning_rate for cell in cells}

    scales = {"paper": table1.paper(), "small": table1.small(), "smoke": SMOKE()}
    monkeypatch.setitem(table1.LEARNING_RATES, "rope", 0.0123)
    for scale, columns in scales.items():
        for (column, attention), rate in rates("table1", scale).items():
            tuned = scale == "small" and attention == "rope"
            assert rate == (0.0123 if tuned else columns[column].learning_rate)
    for other in ("tuning", "figure2"):
        assert 0.0123 not in rates(other, "small").values()


def test_tuning_has_a_column_for_each_learning_rate(tmp_path: Path) -> None:
    for scale in ("paper", "small", "smoke"):
        columns = getattr(tuning, scale)()
        cells = cells_of(REPRODUCTIONS["tuning"], tmp_path, scale, 1, list(MECHANISMS))
        assert len(cells) == len(columns) * len(MECHANISMS)
        assert len({cell.folder for cell in cells}) == len(cells)
        assert all(float(cell.column) == cell.recipe.learning_rate for cell in cells)
        usual = getattr(table1, scale)()["induct_once"]
        assert usual.learning_rate in {recipe.learning_rate for recipe in columns.values()}
        assert {replace(recipe, learning_rate=usual.learning_rate) for recipe in columns.values()} == {usual}
    assert len(tuning.paper()) == 4
    assert list(tuning.small()) == ["0.001", "0.002", "0.004"]


def test_learning_rates_are_chosen_by_the_loss_at_the_training_length() -> None:
    """The higher rate is better past it, and at it only for "a", by the mean over seeds."""
    at = {
        ("a", "0.001"): (1.0, 3.0),
        ("a", "0.002"): (2.0, 1.5),
        ("b", "0.001"): (1.0, 1.0),
        ("b", "0.002"): (4.0, 0.5),
    }
    rows = [
        {"attention": attention, "column": rate, "seed": seed, "length": length, "loss": loss if length == 8 else past}
        for (attention, rate), losses in at.items()
        for seed, loss in enumerate(losses)
        for length, past in ((8, 0.0), (16, 0.1 if rate == "0.002" else 9.0))
    ]
    losses = tuning_losses(rows, {"0.001": 8, "0.002": 8})
    assert losses == {"a": {"0.001": 2.0, "0.002": 1.75}, "b": {"0.001": 1.0, "0.002": 2.25}}
    assert best_rates(losses) == {"a": "0.002", "b": "0.001"}


@pytest.mark.usefixtures("run_here")
def test_tuning_ends_in_a_table_with_the_lowest_loss_of_each_mechanism_bold(tmp_path: Path) -> None:
    assert main(smoke("tuning", tmp_path, "--seeds", "1", "--attention", "tra,rope")) == 0
    heading, _, *lines = (tmp_path / "table.md").read_text().splitlines()
    assert heading == "| attention | 0.001 | 0.002 |"
    rows = content_of(tmp_path)["results"]
    assert len(lines) == 2
    for line, attention in zip(lines, ("tra", "rope"), strict=True):
        name, *shown = line.strip("| ").split(" | ")
        found = {row["column"]: row["loss"] for row in rows if row["attention"] == attention and row["length"] == 8}
        assert name == attention
        assert [text.strip("*") for text in shown] == [f"{found[rate]:.4f}" for rate in ("0.001", "0.002")]
        assert [text.startswith("**") for text in shown] == [loss == min(found.values()) for loss in found.values()]


def test_a_whole_table_of_one_seed_comes_before_the_next_seed(tmp_path: Path) -> None:
    cells = cells_of(REPRODUCTIONS["table1"], tmp_path, "smoke", 3, ["tra", "fot"])
    assert [cell.recipe.seed for cell in cells] == [0] * 12 + [1] * 12 + [2] * 12
    assert len({cell.folder for cell in cells}) == len(set(cells)) == 36
    assert {cell.recipe.model.attention for cell in cells} == {"tra", "fot"}
    assert REPRODUCTIONS["table1"].attention == REPRODUCTIONS["tuning"].attention == tuple(MECHANISMS)


def test_paper_scale_has_the_papers_numbers() -> None:
    columns = table1.paper()
    assert list(columns) == [
        "flip_flop",
        "copy_unique",
        "copy_repeat",
        "induct_once",
        "induct_recent",
        "instructed",
    ]
    flips = columns.pop("flip_flop")
    assert (flips.length, flips.steps, flips.batch) == (512, 25_000, 64)
    assert (flips.data, flips.examples) == ("fixed", flips.steps * flips.batch)
    assert {(entry.name, entry.length) for entry in flips.evaluations} == {
        ("iid", 512),
        ("sparse", 512),
        ("dense", 512),
    }
    for name, recipe in columns.items():
        assert (recipe.task, recipe.length, recipe.batch) == (name, 50, 128)
        assert recipe.steps * recipe.batch == 4_000_000
        assert recipe.data == "fresh"  # one pass: no string is seen twice on purpose
        lengths = [entry.length for entry in recipe.evaluations]
        assert (min(lengths), max(lengths)) == (50, 500 if name == "instructed" else 300)
        assert {entry.name for entry in recipe.evaluations} == set(table1.STRINGS[name])
    for recipe in (flips, *columns.values()):
        model = recipe.model
        assert (model.layers, model.heads, model.width, model.kv_heads) == (4, 4, 256, None)
        assert (recipe.seed, recipe.precision) == (0, "no")
    assert figure1.paper() == {"flip_flop": flips}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["table2"], "table1, tuning, got 'table2'; did you mean 'table1'?"),
        (["figure2", "--attention", "tra,sinusoid"], "got 'sinusoid'; did you mean 'sinusoidal'?"),
        (["table1", "--scale", "smal"], "scale must be one of paper, small, smoke, got 'smal'; did you mean 'small'?"),
        (["cost", "--scale", "smok"], "scale must be one of paper, small, smoke, got 'smok'; did you mean 'smoke'?"),
        (["table1", "--attention", "tra,rop"], "got 'rop'; did you mean 'rope'?"),
        (["cost", "--scale", "smoke", "--attention", "tro"], "got 'tro'; did you mean 'tra'?"),
        (["table1", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["table1", "--jobs", "0"], "jobs must be at least 1, got 0"),
        (["table1", "--shard", "0/2"], "shard must be i/n with 1 <= i <= n, got '0/2'"),
        (["table1", "--shard", "3/2"], "shard must be i/n with 1 <= i <= n, got '3/2'"),
        (["table1", "--shard", "x"], "shard must be i/n with 1 <= i <= n, got 'x'"),
        (["table1", "--shard", "1/2/3"], "shard must be i/n with 1 <= i <= n, got '1/2/3'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_argument_exits_with_two_and_leaves_no_folder(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tra: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_called_tra_where_one_works_is_not_taken_for_the_package(tmp_path: Path) -> None:
    (tmp_path / "tra").mkdir()
    (tmp_path / "tra" / "__init__.py").write_text("raise ImportError('the wrong package')")
    command = Path(sys.executable).with_name("tra")
    options = ["--scale", "smoke", "--seeds", "1", "--attention", "tra", "--output", "out"]
    done = subprocess.run([command, "reproduce", "figure1", *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

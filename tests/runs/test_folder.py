"""A run's folder: what it holds, who may write it, and how it is read back."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from filelock import FileLock

import tra
from tests.runs.tiny import TINY, checkpoints
from tra import plugins
from tra.errors import RunError
from tra.recipes import Evaluation, Recipe
from tra.runs import Run, folder, load_run, train
from tra.tasks import ExactMatch, FlipFlop

MEASURED = replace(TINY, steps=2, evaluations=(Evaluation("iid", 16, 7), Evaluation("sparse", 32, 5)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    return train(MEASURED, tmp_path_factory.mktemp("finished") / "run").folder


def test_a_run_folder_holds_what_it_promises(uninterrupted: Path) -> None:
    assert Recipe.from_json((uninterrupted / "recipe.json").read_text()) == TINY
    metrics = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == list(range(1, 41))
    assert set(metrics[0]) == {"step", "loss", "gradient_norm", "learning_rate", "tokens_per_second"}
    assert all(entry["tokens_per_second"] > 0 for entry in metrics)
    assert checkpoints(uninterrupted) == [36, 40]
    assert json.loads((uninterrupted / "results.json").read_text())["results"] == []
    assert {path.name for path in uninterrupted.iterdir() if path.name != ".lock"} == {
        *("recipe.json", "environment.json", "metrics.jsonl", "checkpoints", "results.json"),
    }


def test_file_names_of_a_run_are_written_in_one_module_alone() -> None:
    """As strings: docstrings may speak of them. Others have a tokenizer.json, results.json and locks of their own."""
    names = ("recipe.json", "environment.json", "metrics.jsonl", "checkpoints", "failure.txt")
    assert set(names) < {value for value in vars(folder).values() if isinstance(value, str)}
    places = {
        path.relative_to(Path(tra.__file__).parent).as_posix()
        for path in Path(tra.__file__).parent.rglob("*.py")
        for name in names
        if f'"{name}"' in path.read_text()
    }
    assert places == {"runs/folder.py"}


def test_a_run_is_read_back_as_it_was_stored(finished: Path) -> None:
    run = load_run(finished)
    assert run.recipe == MEASURED
    assert run.recipe.name == "tiny"
    assert isinstance(run.task, FlipFlop)
    assert (run.exists, run.step, run.steps_done()) == (True, 2, 2)
    assert [entry["step"] for entry in run.metrics()] == [1, 2]
    assert [(result.set, result.length, result.examples) for result in run.results] == [
        ("iid", 16, 7),
        ("sparse", 32, 5),
    ]
    assert all(isinstance(result, ExactMatch) for result in run.results)
    assert not run.model.training
    assert run.failure() is None
    assert repr(run) == f"Run({str(finished)!r})"


def test_what_train_returns_is_what_is_read_back(tmp_path: Path) -> None:
    trained = train(MEASURED, tmp_path / "run")
    read = load_run(str(tmp_path / "run"))
    assert (trained.recipe, trained.step, trained.results) == (read.recipe, read.step, read.results)
    assert not trained.model.training
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], tensor)


def test_results_say_what_was_measured_with_which_weights_and_where(finished: Path) -> None:
    content = json.loads((finished / "results.json").read_text())
    assert {name: content[name] for name in ("step", "steps", "task", "task_version", "measure")} == {
        **{"step": 2, "steps": 2, "task": "flip_flop"},
        **{"task_version": FlipFlop.version, "measure": "exact_match"},
    }
    assert content["environment"]["torch"] == torch.__version__
    measured = load_run(finished).measured()
    assert measured is not None
    assert (measured.step, measured.task_version) == (2, FlipFlop.version)


def test_a_run_is_finished_when_its_recipe_was_measured_after_its_last_step(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_run(finished).finished(MEASURED) == load_run(finished).results != []
    for other in (replace(MEASURED, steps=3), replace(MEASURED, seed=1), replace(MEASURED, evaluations=())):
        assert load_run(finished).finished(other) is None
    assert load_run(finished).finished(replace(MEASURED, name="by another name")) is not None
    monkeypatch.setattr(FlipFlop, "version", 2)
    assert load_run(finished).finished(MEASURED) is None
    assert Run(tmp_path).measured() is None
    assert Run(tmp_path).results == []


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", "[" * 100_000, '{"step": 2, "task_version": 1, "environment": {}, "results": [3]}']
)
def test_results_that_cannot_be_read_are_none(finished: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "recipe.json").write_text(MEASURED.to_json())
    (tmp_path / "results.json").write_text(content)
    assert load_run(tmp_path).measured() is None
    assert load_run(tmp_path).finished(MEASURED) is None


def test_steps_that_are_done_are_those_logged_whole(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.steps_done() == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0}\n{"step": 20, "loss": 0.5}\n{"step": 3')
    assert run.steps_done() == 20
    (tmp_path / "metrics.jsonl").write_text("what is this\n")
    assert run.steps_done() == 0


def test_lines_after_the_step_that_a_run_goes_on_from_are_taken_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.log(0) as metrics:
        for step in range(1, 6):
            metrics.write({"step": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6')
    with run.log(3) as metrics:
        metrics.write({"step": 4, "again": True})
    assert run.metrics() == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]
    with run.log(4, active=False) as metrics:
        metrics.write({"step": 5})
    assert run.steps_done() == 4


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\n", b"{}\n", b"3\n", b'{"step": "2"}\n', b"\xff\n", b"[" * 100_000 + b"\n"]
)
def test_a_damaged_line_of_a_log_is_named_unless_it_will_be_written_again(tmp_path: Path, damage: bytes) -> None:
    run, log = Run(tmp_path), tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}}}\n'.encode() for step in (2, 4, 6)]
    log.write_bytes(lines[0] + damage + lines[2])
    assert run.steps_done() == 0
    for use in (run.metrics, lambda: run.log(4)):
        with pytest.raises(RunError, match=f"line 2 of {log} is damaged: mend it, or take it out"):
            use()
    assert log.read_bytes() == lines[0] + damage + lines[2]
    log.write_bytes(lines[0] + lines[1] + damage + lines[2])
    with run.log(4):
        pass
    assert log.read_bytes() == lines[0] + lines[1]


@pytest.mark.parametrize("content", ["{", "3", "[" * 100_000])
def test_a_damaged_environment_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "recipe.json").write_text(TINY.to_json())
    (tmp_path / "environment.json").write_text(content)
    with pytest.raises(RunError, match=rf"{tmp_path}/environment\.json is damaged \(.*\): move it away to go on"):
        load_run(tmp_path).record_environment(0)
    assert (tmp_path / "environment.json").read_text() == content


def test_a_failure_is_kept_until_the_run_goes_well(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert run.failure() is None
    run.record_failure("the loss is nan")
    assert Run(tmp_path / "run").failure() == "the loss is nan"
    run.record_failure(None)
    run.record_failure(None)
    assert run.failure() is None


def test_files_that_are_no_regular_ones_are_named_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.json")
    with pytest.raises(OSError, match=r"Not a regular file: '.*/recipe\.json'"):
        load_run(tmp_path)
    (tmp_path / "recipe.json").unlink()
    (tmp_path / "recipe.json").write_text(TINY.to_json())
    for name in ("results.json", "failure.txt"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(RunError, match=r"results\.json could not be read: .*Not a regular file"):
        load_run(tmp_path).measured()
    with pytest.raises(OSError, match="Not a regular file"):
        load_run(tmp_path).failure()


def test_the_environment_has_an_entry_for_each_time_that_a_run_began_or_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tra", "train", "a name with spaces"])
    path = tmp_path / "run"
    train(replace(TINY, steps=2), path)
    (path / "recipe.json").write_text(replace(TINY, steps=5).to_json())
    monkeypatch.setattr(sys, "argv", ["again"])
    train(replace(TINY, steps=5), path)
    train(replace(TINY, steps=5), path)  # which is finished: nothing is computed anywhere
    first, second = json.loads((path / "environment.json").read_text())
    assert (first["from_step"], second["from_step"]) == (0, 2)
    assert shlex.split(first["command"]) == ["tra", "train", "a name with spaces"]
    assert second["command"] == "again"
    assert (first["torch"], first["python"]) == (torch.__version__, platform.python_version())
    assert first["packages"]["safetensors"]
    assert (first["tra"], first["processes"], first["plugins"]) == (tra.__version__, 1, {})


def test_the_environment_names_the_commit_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    monkeypatch.chdir(tmp_path)
    train(replace(TINY, steps=1), tmp_path / "before")
    git("init")
    (tmp_path / ".gitignore").write_text("run*\nbefore\n")
    git("add", ".gitignore")
    git("commit", "-m", "first")
    train(replace(TINY, steps=1), tmp_path / "run")
    (tmp_path / "own.py").write_text("changed = True\n")
    train(replace(TINY, steps=1), tmp_path / "run-dirty")
    before, clean, dirty = (
        json.loads((tmp_path / name / "environment.json").read_text())[0]["working_folder"]["commit"]
        for name in ("before", "run", "run-dirty")
    )
    assert before is None
    assert clean == {"hash": git("rev-parse", "HEAD"), "dirty": False}
    assert dirty == {**clean, "dirty": True}


def test_the_environment_names_the_plug_ins_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("my_tasks")

    class Mine(FlipFlop):
        name = "mine"

    own.TASKS = {"mine": Mine}
    monkeypatch.setattr(plugins, "_loaded", {"my_tasks": own})
    run = train(replace(TINY, task="mine", steps=1), tmp_path / "run")
    assert json.loads((run.folder / "environment.json").read_text())[0]["plugins"].keys() == {"my_tasks"}
    assert json.loads((run.folder / "recipe.json").read_text())["plugins"] == ["my_tasks"]
    monkeypatch.setattr(plugins, "_loaded", {})
    with pytest.raises(RunError, match="the plug-in my_tasks is needed and not loaded"):
        load_run(run.folder)


def test_a_finished_run_is_not_touched_again(finished: Path, tmp_path: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_ino)
            for path in finished.rglob("*")
            if path.name != ".lock"
        }

    before = state()
    again = train(MEASURED, finished)
    assert state() == before
    assert again.results == load_run(finished).results


def test_a_run_that_was_trained_but_not_measured_is_measured_alone(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained = train(MEASURED, path)
    expected, metrics = trained.results, (path / "metrics.jsonl").stat().st_mtime_ns
    (path / "results.json").unlink()
    assert train(MEASURED, path).results == expected == load_run(path).results
    assert (path / "metrics.jsonl").stat().st_mtime_ns == metrics


def test_wrong_recipe_leaves_the_folder_free(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(ValueError, match="must be"):
        train(replace(TINY, steps=2, data=str(tmp_path / "nowhere")), path)
    assert not (path / "recipe.json").exists()
    train(replace(TINY, steps=2), path)


def test_recipe_stored_before_a_field_existed_resumes(tmp_path: Path) -> None:
    path, recipe = tmp_path / "run", replace(TINY, steps=2)
    train(recipe, path)
    stored = json.loads((path / "recipe.json").read_text())
    del stored["keep_checkpoints"]
    (path / "recipe.json").write_text(json.dumps(stored))
    train(recipe, path)
    assert checkpoints(path) == [2]


def test_folder_of_another_recipe_is_refused_with_what_differs(finished: Path) -> None:
    other = MEASURED.changed({"batch": 4, "seed": 9, "model.attention": "rope"})
    message = (
        f"folder {finished} holds a run of another recipe, with other values of batch (8, now 4), seed (0, now 9), "
        "model.attention ('tra', now 'rope')"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        train(other, finished)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_run(finished).check_recipe(other)
    load_run(finished).check_recipe(replace(MEASURED, name="by another name"))


def test_folder_of_another_process_is_refused(finished: Path) -> None:
    with FileLock(finished / ".lock"), pytest.raises(RunError, match=f"another process is training in {finished}"):
        train(MEASURED, finished)
    with Run(finished).claimed():
        pass


def test_a_claim_removes_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / ".results.json.123.partial").write_text("{")
    (tmp_path / "notes.txt").write_text("somebody's own")
    with Run(tmp_path).claimed():
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "notes.txt"}


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_a_path_that_is_a_file_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("a file")
    message = f"folder must be a folder, but {tmp_path}/taken is a file"
    with pytest.raises(ValueError, match=re.escape(message)):
        train(TINY, f"{tmp_path}/taken{below}")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ValueError, match="folder must be writable, but /proc"):
        train(TINY, "/proc/run")


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match=f"folder must be writable, but {tmp_path} is not"):
        train(TINY, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"run must be a folder that holds recipe.json, got {tmp_path}"):
        load_run(tmp_path)
    (tmp_path / "recipe.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=f"{tmp_path}/recipe.json is not a recipe that this version can read: 'model'"):
        load_run(tmp_path)
    (tmp_path / "recipe.json").write_text(TINY.to_json())
    with pytest.raises(RunError, match=f"run {tmp_path} has no intact checkpoint yet"):
        load_run(tmp_path).model  # noqa: B018
    assert load_run(tmp_path).step == 0


@pytest.mark.parametrize("content", ["[]", '"x"', "3", "[" * 100_000, '{"model": [], "evaluations": 3}'])
def test_a_recipe_that_makes_no_sense_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/recipe.json is not a recipe that this version can read: "):
        load_run(tmp_path)


def test_a_recipe_that_asks_for_too_much_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(TINY.to_json().replace('"layers": 2', '"layers": 300000'))
    with pytest.raises(ValueError, match=r"recipe\.json .*: layers must be at most 10,000, got 300,000"):
        load_run(tmp_path)

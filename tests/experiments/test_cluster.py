"""Runs as jobs of a cluster, through submitit."""

import json
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.helpers import DelayedSubmission

from tests.experiments.small import content_of, flip_flop, smoke
from tests.runs.tiny import logged
from tra import plugins
from tra.cli import main
from tra.errors import Interrupted, RunError
from tra.experiments import cluster
from tra.experiments.cells import Cell
from tra.experiments.cluster import Job, make_executor, run_on_cluster
from tra.experiments.local_jobs import safe_path
from tra.recipes import Recipe
from tra.runs import train
from tra.runs.training import _Trainer

SOURCE = Path(__file__).with_name("own_experiment.py")
LONG = flip_flop().changed({"steps": 12, "checkpoint_every": 5, "log_every": 1})


def cell(folder: Path, **changes: Any) -> Cell:
    return Cell("flip_flop", "tra", LONG.changed(changes), folder)


def test_a_command_runs_every_run_as_a_job_that_knows_the_plugin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both rows, with nothing to tune. A folder called tra beside it is not taken for the package."""
    monkeypatch.setattr(cluster, "SECONDS_BETWEEN_LOOKS", 0.2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tra").mkdir()
    (tmp_path / "tra" / "__init__.py").write_text("raise ImportError('the wrong package')")
    text = SOURCE.read_text()
    (tmp_path / "mine.py").write_text(text[: text.index("    tuning=")] + ")\n")
    options = ["--cluster", "local", "--cluster-options", "timeout_min=5", "--figures", "svg"]
    assert main(["reproduce", "mine.py", "--output", "out", *options]) == 0
    shown = capsys.readouterr()
    assert "2 jobs submitted to local; what they print is in out/cluster\n" in shown.out
    assert shown.err == ""
    content = content_of(tmp_path / "out")
    assert (content["runs"], content["finished"], content["failures"]) == (2, 2, {})
    assert {row["attention"] for row in content["results"]} == {"tra", "recent slope=0.5"}
    assert sorted(json.loads((tmp_path / "out" / "cluster" / "jobs.json").read_text())) == [
        str(tmp_path / "out" / "runs" / "rare" / row / "0") for row in ("recent-slope=0.5", "tra")
    ]
    assert main(["reproduce", "mine.py", "--output", "out", *options]) == 0
    shown = capsys.readouterr()
    assert "2 of 2 runs are finished already" in shown.out
    assert "submitted" not in shown.out


def test_a_job_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SECONDS_BETWEEN_LOOKS", 0.2)
    stranger = cell(tmp_path / "stranger")
    stranger.folder.mkdir()
    (stranger.folder / "recipe.json").write_text(LONG.changed({"batch": 2}).to_json())
    run_on_cluster([stranger], "local", {"timeout_min": 5}, tmp_path / "cluster")
    assert stranger.results() is None
    assert "holds a run of another recipe, with other values of batch (2, now 4)" in (stranger.run.failure() or "")


def test_a_job_that_dies_is_a_failure_that_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        job_id = "7"

        def done(self) -> bool:
            return True

        def exception(self) -> Exception:
            return RuntimeError("slurmstepd:\nerror: out of memory")

    one = cell(tmp_path / "run")
    monkeypatch.setattr(cluster, "make_executor", lambda *_: Executor([Dead()]))
    run_on_cluster([one], "slurm", {}, tmp_path / "cluster")
    assert one.run.failure() == f"error: out of memory; see {tmp_path / 'cluster'}"


def test_a_preempted_job_is_submitted_again_as_it_was(tmp_path: Path) -> None:
    job = Job(cell(tmp_path / "run"), ("mine",))
    again = job.checkpoint()
    assert isinstance(again, DelayedSubmission)
    assert again.function is job
    again.dump(tmp_path / "job.pkl")
    sent = DelayedSubmission.load(tmp_path / "job.pkl").function
    assert isinstance(sent, Job)
    assert vars(sent) == vars(job)
    assert Path(job.folder).is_absolute()


def test_a_job_of_tuning_leaves_no_checkpoint_behind(tmp_path: Path) -> None:
    one = replace(cell(tmp_path / "run"), choice={"learning_rate": 1e-3})
    Job(one, ())()
    assert one.results()
    assert not one.run.checkpoints.steps()


def test_a_job_that_ran_before_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted in the middle of a step, when only what was saved before it is left."""
    whole = train(LONG, tmp_path / "whole")
    job = Job(cell(tmp_path / "run"), ())
    step = _Trainer._step

    def preempted(trainer: Any, number: int, *arguments: Any) -> Any:
        if number == 8:
            raise SystemExit(-1)  # as submitit does in its handler
        return step(trainer, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_Trainer, "_step", preempted)
        with pytest.raises(SystemExit):
            job()
    one = cell(tmp_path / "run")
    assert one.results() is None
    assert one.run.failure() is None
    assert [path.name for path in sorted((one.folder / "checkpoints").iterdir())] == ["step-00000005"]
    job.checkpoint().result()
    assert one.results() == whole.results
    assert logged(one.folder) == logged(whole.folder)
    begun = json.loads((one.folder / "environment.json").read_text())
    assert [entry["from_step"] for entry in begun] == [0, 5]
    for name, weight in one.run.model.state_dict().items():
        assert weight.equal(whole.model.state_dict()[name])


def test_a_job_loads_the_plugins_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(SOURCE, tmp_path / "own_file.py")
    module = plugins.load(str(tmp_path / "own_file.py"))
    job = Job(Cell("rare", "recent", module.rare("recent"), tmp_path / "run"), plugins.loaded())
    assert str(tmp_path / "own_file.py") in job.needed
    for name in ("_loaded", "_paths"):
        monkeypatch.setattr(plugins, name, {})
    with pytest.raises(RunError, match=r"the plug-in own_file\.py is needed and not loaded"):
        Recipe.from_json(job.recipe)
    job()
    assert (tmp_path / "run" / "results.json").exists()


def test_a_job_finds_modules_where_its_command_found_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copy(SOURCE, tmp_path / "own_module.py")
    plugins.add_folder(str(tmp_path))
    module = plugins.load("own_module")
    job = Job(Cell("rare", "recent", module.rare("recent"), tmp_path / "run"), plugins.loaded())
    for name in ("_loaded", "_paths"):
        monkeypatch.setattr(plugins, name, {})
    sys.path.remove(str(tmp_path))
    del sys.modules["own_module"]
    job()
    assert (tmp_path / "run" / "results.json").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the job's process in /proc")
def test_a_job_that_the_cluster_preempts_is_begun_again_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = cell(tmp_path / "run", steps=300, checkpoint_every=20, log_every=1)
    executor = make_executor("local", {"timeout_min": 5}, tmp_path / "cluster")
    with safe_path():
        job = executor.submit(Job(one, ()))
    deadline = time.monotonic() + 120
    while one.run.steps_done() < 25:
        assert time.monotonic() < deadline, job.stderr()
        time.sleep(0.01)
    controller = int(job.job_id)
    (task,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)
    assert job.exception() is None
    begun = json.loads((one.folder / "environment.json").read_text())
    assert len(begun) == 2
    assert begun[0]["from_step"] == 0
    assert 20 <= begun[1]["from_step"] < 300
    assert one.results() is not None
    assert [entry["step"] for entry in one.run.metrics()] == list(range(1, 301))


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one here."""
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: 2))


@pytest.mark.usefixtures("slurm")
def test_options_are_those_of_submitit_or_of_the_cluster_itself(tmp_path: Path) -> None:
    options = {"partition": "gpu", "gpus_per_node": 1, "timeout_min": 600, "slurm_account": "mine", "name": "grid"}
    executor = make_executor("slurm", options, tmp_path / "cluster")
    expected = {"partition": "gpu", "account": "mine", "gpus_per_node": 1, "time": 600, "job_name": "grid"}
    assert {name: executor.parameters.get(name) for name in expected} == expected
    assert make_executor("slurm", {}, tmp_path / "cluster").parameters["job_name"] == "tra"


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    "name, options, message",
    [
        ("slurm", {"partitio": "gpu"}, "cluster_options must be among .*Unknown argument 'partitio'.* partition"),
        ("slurm", {"slurm_tim": 3}, "cluster_options must be among .*Unknown argument 'tim'"),
        ("slurm", {"gpus_per_node": "two"}, "cluster_options must suit slurm: .*gpus_per_node"),
        ("local", {"partition": "gpu"}, "cluster_options must be among .*Unknown argument 'partition'"),
        ("local", {"nodes": 2}, "only one node"),
        ("pbs", {}, "cluster must be one of local, slurm, got 'pbs'"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_executor(name, options, tmp_path / "cluster")


def test_wrong_options_are_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = smoke("figure1", tmp_path / "out", "--cluster", "local", "--cluster-options")
    assert main([*command, "timeout_mi=5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tra: error: cluster_options must be among name, timeout_min, ")
    assert "Unknown argument 'timeout_mi'" in error
    assert error.count("\n") == 1
    assert main([*command, "timeout_min"]) == 2
    assert "NAME=VALUE, got 'timeout_min'" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("srun") is not None, reason="there is a Slurm here")
def test_a_cluster_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cluster must be one that this machine can reach: .*srun"):
        make_executor("slurm", {}, tmp_path / "cluster")


class Waiting:
    """A job of a cluster, in one state after another."""

    def __init__(self, states: list[str], number: str = "11") -> None:
        self.states, self.job_id = states, number

    @property
    def state(self) -> str:
        return self.states[0]

    def done(self) -> bool:
        if len(self.states) > 1:
            self.states.pop(0)
        return self.states[0] not in ("PENDING", "RUNNING")

    def exception(self) -> None:
        return None


class Executor:
    """What is submitted to it."""

    def __init__(self, fresh: list[Any]) -> None:
        self.fresh, self.submitted, self.folder = list(fresh), [], Path("cluster")

    def batch(self) -> Any:
        return nullcontext()

    def submit(self, job: Job) -> Any:
        self.submitted.append(job)
        return self.fresh.pop(0)


def test_jobs_that_were_left_to_the_cluster_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SECONDS_BETWEEN_LOOKS", 0.0)
    cells = [cell(tmp_path / name) for name in ("first", "second")]
    jobs = [Waiting(["PENDING"], "11"), Waiting(["RUNNING"], "12")]
    executor = Executor(jobs)
    monkeypatch.setattr(cluster, "make_executor", lambda *_: executor)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cluster.time, "sleep", interrupted)
        with pytest.raises(Interrupted, match="stopped waiting; 2 jobs are still with slurm, and are looked for again"):
            run_on_cluster(cells, "slurm", {}, tmp_path / "cluster")
    assert [job.folder for job in executor.submitted] == [str(one.folder) for one in cells]

    # The first is still waiting, the second was cancelled meanwhile.
    executor = Executor([Waiting(["RUNNING", "COMPLETED"], "13")])
    there = {"11": Waiting(["RUNNING", "RUNNING", "COMPLETED"], "11"), "12": Waiting(["CANCELLED by 0"], "12")}
    monkeypatch.setattr(submitit, "SlurmJob", lambda _, number: there[number])
    run_on_cluster(cells, "slurm", {}, tmp_path / "cluster")
    assert [job.folder for job in executor.submitted] == [str(cells[1].folder)]
    assert json.loads((tmp_path / "cluster" / "jobs.json").read_text()) == {
        str(cells[0].folder): "11",
        str(cells[1].folder): "13",
    }
    assert cells[0].run.failure() == f"the job ended without a result; see {tmp_path / 'cluster'}"

"""Many runs on a cluster, through submitit: each is a job, and one that is preempted goes on from its checkpoint."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tra import plugins
from tra.errors import Interrupted
from tra.experiments.cells import Cell
from tra.experiments.local_jobs import report, run_cell, safe_path
from tra.experiments.request import CLUSTERS
from tra.files import write_json
from tra.lookup import lookup
from tra.progress import progress, say
from tra.recipes import Recipe
from tra.runs.memory import reuse_memory

if TYPE_CHECKING:
    import submitit

SHARED_OPTIONS = (
    "name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "stderr_to_stdout",
)  # fmt: skip
"""Parameters that submitit translates for every cluster; those of one cluster alone begin with its name."""
SECONDS_BETWEEN_LOOKS = 2.0
JOBS = "jobs.json"
"""Holds the number of each run's job, so that another call finds those still there."""
ALIVE = ("CONFIGURING", "COMPLETING", "PENDING", "REQUEUED", "RESIZING", "RUNNING", "SUSPENDED")


class Job:
    """What a node of the cluster is sent: a run as plain text."""

    def __init__(self, cell: Cell, needed: Sequence[str]) -> None:
        self.column, self.row, self.folder = cell.column, cell.row, str(cell.folder.absolute())
        self.recipe, self.needed, self.folders = cell.recipe.to_json(), tuple(needed), plugins.folders()
        self.choice, self.share = dict(cell.choice), cell.share

    def __call__(self) -> None:
        for folder in self.folders:
            plugins.add_folder(folder)
        for name in self.needed:
            plugins.load(name)
        reuse_memory()
        recipe, run = Recipe.from_json(self.recipe), Path(self.folder)
        run_cell(Cell(self.column, self.row, recipe, run, choice=self.choice, share=self.share))

    def checkpoint(self) -> Any:
        """submitit asks for this when the job's time is up or the job is preempted: the same again, which goes on."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_on_cluster(cells: Sequence[Cell], cluster: str, options: Mapping[str, Any], folder: Path) -> None:
    """Run every cell as a job of its own, and wait for them.

    Args:
        cells: the runs.
        cluster: "slurm", or "local", which stays on this machine.
        options: submitit's parameters, as ``gpus_per_node`` or ``timeout_min``, and those of the cluster itself, as
            ``partition``.
        folder: for what the jobs print.
    """
    executor = make_executor(cluster, options, folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = _still_there(cluster, executor.folder, folder)
    fresh = [cell for cell in cells if str(cell.folder.absolute()) not in jobs]
    if len(fresh) < len(cells):
        say(f"{len(cells) - len(fresh)} jobs are still with {cluster}")
    if fresh:
        for cell in fresh:
            cell.run.record_failure(None)
        with safe_path(), executor.batch():
            jobs |= {str(cell.folder.absolute()): executor.submit(Job(cell, plugins.loaded())) for cell in fresh}
        write_json(folder / JOBS, {run: job.job_id for run, job in jobs.items()})
        say(f"{len(fresh)} jobs submitted to {cluster}; what they print is in {folder}")
    began, total = time.monotonic(), sum(cell.recipe.steps for cell in cells)
    start = sum(cell.run.steps_done() for cell in cells)
    running = list(cells)
    try:
        with progress(f"{len(cells)} jobs", total, "step", start) as update:
            while running:
                for cell in list(running):
                    job = jobs[str(cell.folder.absolute())]
                    if job.done():
                        running.remove(cell)
                        failed = job.exception()
                        how = "the job ended without a result" if failed is None else _what_was_raised(failed)
                        report(cell, time.monotonic() - began, f"{how}; see {folder}")
                update(sum(cell.run.steps_done() for cell in cells), running=len(running))
                if running:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped waiting; {len(running)} jobs are still with {cluster}, and are looked for again"
        ) from None


def make_executor(cluster: str, options: Mapping[str, Any], folder: Path) -> Any:
    """submitit's executor with these options; a wrong one is a ValueError."""
    lookup(dict.fromkeys(CLUSTERS), cluster, "cluster")
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise ValueError("cluster must have submitit installed: pip install submitit") from error
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    except RuntimeError as error:
        raise ValueError(f"cluster must be one that this machine can reach: {error}") from error
    named: dict[str, Any] = {"name": "tra"}
    for name, value in options.items():
        bare = name.removeprefix(f"{cluster}_")
        named[bare if bare in SHARED_OPTIONS else f"{cluster}_{bare}"] = value
    try:
        executor.update_parameters(**named)
    except NameError as error:
        unknown = str(error).partition("\n")[0]
        raise ValueError(
            f"cluster_options must be among {', '.join(SHARED_OPTIONS)} and {cluster}'s own: {unknown}"
        ) from error
    except (AssertionError, TypeError) as error:
        raise ValueError(f"cluster_options must suit {cluster}: {error}") from error
    return executor


def _still_there(cluster: str, logs: Path, folder: Path) -> dict[str, "submitit.Job[None]"]:
    """The jobs that an earlier call left waiting or running, by the folders of their runs."""
    import submitit

    try:
        stored = json.loads((folder / JOBS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    kind = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}[cluster]
    found = {run: kind(logs, number) for run, number in stored.items()}
    return {run: job for run, job in found.items() if str(job.state).upper().startswith(ALIVE)}


def _what_was_raised(error: Any) -> str:
    """The last line of a traceback in what submitit says of a job, or its first line where there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    raised = [line for line in lines if re.match(r"(?i)[\w.]*(error|exception|interrupt)\b", line)]
    return (raised or lines[:1])[-1]

"""Many runs in one folder: which are finished, and running the others side by side in processes of their own."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tra.errors import Interrupted, RunError
from tra.evaluation import evaluate_all
from tra.files import write_whole
from tra.progress import progress
from tra.recipes import Recipe
from tra.report import set_of
from tra.runs import load_recipe, store_results
from tra.training import train

SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    column: str
    recipe: Recipe
    folder: Path

    @property
    def label(self) -> str:
        return f"{self.column} {self.recipe.model.attention} seed {self.recipe.seed}"

    def results(self) -> list[dict[str, Any]] | None:
        """What was measured, or None if the run of this recipe is not finished."""
        try:
            stored = json.loads((self.folder / "results.json").read_text())
            same = (stored["step"], stored["task_version"]) == (self.recipe.steps, self.recipe.build_task().version)
            return stored["results"] if same and load_recipe(self.folder) == self.recipe else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def failure(self) -> str | None:
        """Why the last attempt failed, if it did."""
        reason = self.folder / "failure.txt"
        return reason.read_text().strip() if reason.exists() else None

    def record_failure(self, reason: str | None) -> None:
        """Write down why the run failed, or that it did not."""
        if reason is None:
            (self.folder / "failure.txt").unlink(missing_ok=True)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "failure.txt", reason + "\n")

    def steps_done(self) -> int:
        """Steps that have been logged so far."""
        try:
            last = (self.folder / "metrics.jsonl").read_text().splitlines()[-1:]
            return int(json.loads(last[0])["step"]) if last else 0
        except (OSError, ValueError):
            return 0

    def run(self) -> None:
        """Train from where the run stands, measure, store; a failure is written down instead of raised."""
        quiet = Console(quiet=True)
        self.record_failure(None)
        try:
            model = train(self.recipe, self.folder, console=quiet)
            measured = evaluate_all(model, self.recipe, self.recipe.evaluations, quiet)
            store_results(self.folder, self.recipe, self.recipe.steps, measured)
        except Exception as error:
            known = isinstance(error, (RunError, ValueError, OSError))
            self.record_failure(str(error) if known else f"{type(error).__name__}: {error}")


def run_all(cells: Sequence[Cell], jobs: int, console: Console) -> None:
    """Run every cell that is not finished, ``jobs`` at a time with the threads divided among them.

    A run that fails, or whose process dies, does not stop the others. After Ctrl-C every run has saved a checkpoint.
    """
    waiting = [cell for cell in cells if cell.results() is None]
    if len(waiting) < len(cells):
        console.print(f"{len(cells) - len(waiting)} of {len(cells)} runs are finished already")
    if not waiting:
        return
    # Forked from a process that has only imported things: started at once, and safe with threads.
    if "forkserver" in multiprocessing.get_all_start_methods():
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tra.grid"])
        _start_forkserver()
    else:
        context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    total = sum(cell.recipe.steps for cell in waiting)
    steps = {cell.folder: cell.steps_done() for cell in waiting}
    running: dict[int, tuple[BaseProcess, Cell, float]] = {}
    started: list[BaseProcess] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's wish is like Ctrl-C
    try:
        with progress(console, f"{len(waiting)} runs", total, "step", sum(steps.values())) as update:
            while waiting or running:
                for slot in range(jobs):
                    if waiting and slot not in running:
                        cell = waiting.pop(0)
                        cell.record_failure(None)
                        process = context.Process(target=_work, args=(cell, threads, slot))
                        started.append(process)
                        process.start()
                        running[slot] = process, cell, time.monotonic()
                wait([process.sentinel for process, _, _ in running.values()], timeout=SECONDS_BETWEEN_LOOKS)
                for slot, (process, cell, since) in list(running.items()):
                    steps[cell.folder] = cell.steps_done()
                    if process.exitcode is not None:
                        del running[slot]
                        steps[cell.folder] = cell.recipe.steps  # done, or given up
                        _report(cell, process.exitcode, time.monotonic() - since, console)
                update(sum(steps.values()), running=len(running), waiting=len(waiting))
    except KeyboardInterrupt:
        _stop(started)
        done = sum(cell.results() is not None for cell in cells)
        raise Interrupted(f"stopped with {done} of {len(cells)} runs finished; the others go on from here") from None
    finally:
        _stop(started)
        signal.signal(signal.SIGTERM, before)


def _start_forkserver() -> None:
    """Without the current folder first in its path, where a folder called tra would be taken for this package."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _stop(processes: Sequence[BaseProcess]) -> None:
    """Ask those still running to save and stop, and wait for them."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join()


def _report(cell: Cell, code: int | None, seconds: float, console: Console) -> None:
    results, reason = cell.results(), cell.failure()
    if results is None:
        if reason is None:
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            reason = f"the process ended with {how}"
            try:
                cell.record_failure(reason)
            except OSError as error:
                reason += f" ({error})"
        console.print(f"{cell.label}: failed: {reason}", style="red", markup=False, highlight=False)
        return
    measure = cell.recipe.build_task().measure
    shown = "  ".join(f"{set_of(result)}@{result['length']} {result[measure]:.2f}" for result in results)
    console.print(f"{cell.label}: {shown} ({seconds:.0f} s)", markup=False, highlight=False)


def _work(cell: Cell, threads: int, slot: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    if len(devices) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    try:
        cell.run()
    except KeyboardInterrupt:
        os._exit(130)


def _end_with_parent() -> None:
    """Save and stop when the process that started this one is gone, even by kill -9."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

"""Many runs in one folder: which are finished, and running the others side by side in processes of their own."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
            same = load_recipe(self.folder) == self.recipe
        except (OSError, ValueError):
            return None
        current = stored["task_version"] == self.recipe.build_task().version
        return stored["results"] if same and current and stored["step"] == self.recipe.steps else None

    def failure(self) -> str | None:
        """Why the last attempt failed, if it did."""
        return None if self.results() is not None or not self._failure.exists() else self._failure.read_text().strip()

    def steps_done(self) -> int:
        """Steps that have been logged so far."""
        try:
            last = (self.folder / "metrics.jsonl").read_text().splitlines()[-1:]
            return int(json.loads(last[0])["step"]) if last else 0
        except (OSError, ValueError):
            return 0

    @cached_property
    def _failure(self) -> Path:
        return self.folder / "failure.txt"

    def run(self) -> None:
        """Train from where the run stands, measure, store; a failure is written down instead of raised."""
        quiet = Console(quiet=True)
        self._failure.unlink(missing_ok=True)
        try:
            model = train(self.recipe, self.folder, console=quiet)
            measured = evaluate_all(model, self.recipe, self.recipe.evaluations, quiet)
            store_results(self.folder, self.recipe, self.recipe.steps, measured)
        except Exception as error:
            self.folder.mkdir(parents=True, exist_ok=True)
            known = isinstance(error, (RunError, ValueError, OSError))
            write_whole(self._failure, (str(error) if known else f"{type(error).__name__}: {error}") + "\n")


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
    else:
        context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    unfinished, total = list(waiting), sum(cell.recipe.steps for cell in waiting)
    earlier = sum(cell.steps_done() for cell in waiting)
    running: dict[int, tuple[BaseProcess, Cell, float]] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's wish is like Ctrl-C
    try:
        with progress(console, f"{len(waiting)} runs", total, "step", earlier) as update:
            while waiting or running:
                for slot in range(jobs):
                    if waiting and slot not in running:
                        cell = waiting.pop(0)
                        process = context.Process(target=_work, args=(cell, threads, slot))
                        process.start()
                        running[slot] = process, cell, time.monotonic()
                wait([process.sentinel for process, _, _ in running.values()], timeout=SECONDS_BETWEEN_LOOKS)
                for slot, (process, cell, started) in list(running.items()):
                    if process.exitcode is not None:
                        del running[slot]
                        _report(cell, process.exitcode, time.monotonic() - started, console)
                update(sum(cell.steps_done() for cell in unfinished), running=len(running), waiting=len(waiting))
    except KeyboardInterrupt:
        for process, _, _ in running.values():
            process.terminate()
        for process, _, _ in running.values():
            process.join()
        done = sum(cell.results() is not None for cell in cells)
        raise Interrupted(f"stopped with {done} of {len(cells)} runs finished; the others go on from here") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(cell: Cell, code: int | None, seconds: float, console: Console) -> None:
    results = cell.results()
    if results is None and cell.failure() is None:
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        write_whole(cell._failure, f"the process ended with {how}\n")
    if results is None:
        console.print(f"{cell.label}: failed: {cell.failure()}", style="red", markup=False, highlight=False)
        return
    shown = "  ".join(f"{result['set']}@{result['length']} {result['exact_match']:.2f}" for result in results)
    console.print(f"{cell.label}: {shown} ({seconds:.0f} s)", markup=False, highlight=False)


def _work(cell: Cell, threads: int, slot: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if torch.cuda.device_count() > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(slot % torch.cuda.device_count())
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

"""Many runs side by side: in processes of their own on this machine."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import torch

from tra import plugins
from tra.errors import DivergenceError, Interrupted, RunError
from tra.experiments.cells import Cell
from tra.progress import progress, say
from tra.runs import train
from tra.runs.folder import DIVERGED
from tra.runs.memory import reuse_memory

SECONDS_BETWEEN_LOOKS = 0.5
VISIBLE = "CUDA_VISIBLE_DEVICES"


def run_cell(cell: Cell) -> None:
    """Train from the last checkpoint, measure, store. A failure is recorded, not raised."""
    run = cell.run
    run.record_failure(None)
    try:
        train(cell.recipe, cell.folder)
        if cell.choice:  # what tuning wants to know is in the results
            run.checkpoints.remove()
    except Exception as error:
        known = isinstance(error, (RunError, ValueError, OSError))
        before = DIVERGED if isinstance(error, DivergenceError) else "" if known else f"{type(error).__name__}: "
        run.record_failure(f"{before}{error}", traceback.format_exc())


def unfinished(cells: Sequence[Cell]) -> list[Cell]:
    """The runs that are not finished. Says how many are, and what is wrong with those that cannot be read."""
    found = {cell: cell.read() for cell in cells}
    waiting = [cell for cell, (results, _) in found.items() if results is None]
    for cell in waiting:
        if (problem := found[cell][1]) is not None:
            say(f"{cell.label}: {problem}", style="red")
    if len(waiting) < len(cells):
        say(f"{len(cells) - len(waiting)} of {len(cells)} runs are finished already")
    return waiting


def run_all(cells: Sequence[Cell], jobs: int) -> None:
    """Run these cells, ``jobs`` at a time with the threads and GPUs divided among them.

    A run that fails, or whose process dies, does not stop the others. After Ctrl-C every run has saved a checkpoint.
    """
    waiting = list(cells)
    # Forked from a process that has only imported things: started at once, and safe with threads.
    if "forkserver" in multiprocessing.get_all_start_methods():
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tra.experiments.local_jobs"])
        with safe_path():
            forkserver.ensure_running()
    else:
        context = multiprocessing.get_context("spawn")
    threads, devices = max(1, torch.get_num_threads() // jobs), gpus()
    total = sum(cell.recipe.steps for cell in waiting)
    steps = {cell.folder: cell.run.steps_done() for cell in waiting}
    running: dict[int, tuple[BaseProcess, Cell, float]] = {}
    started: list[BaseProcess] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler asks to stop: as Ctrl-C
    try:
        with progress(f"{len(waiting)} runs", total, "step", sum(steps.values())) as update:
            while waiting or running:
                for slot in range(jobs):
                    while waiting and slot not in running:
                        cell = waiting.pop(0)
                        if cell.results() is not None:  # the same command runs in another process too
                            steps[cell.folder] = cell.recipe.steps
                            say(f"{cell.label}: finished by another process")
                            continue
                        cell.run.record_failure(None)
                        device = devices[slot % len(devices)]
                        process = context.Process(target=_work, args=(cell, threads, device, plugins.loaded()))
                        started.append(process)
                        with _without_main():
                            process.start()
                        running[slot] = process, cell, time.monotonic()
                wait([process.sentinel for process, _, _ in running.values()], timeout=SECONDS_BETWEEN_LOOKS)
                for slot, (process, cell, since) in list(running.items()):
                    steps[cell.folder] = cell.run.steps_done()
                    if process.exitcode is not None:
                        del running[slot]
                        steps[cell.folder] = cell.recipe.steps  # done, or given up
                        report(cell, time.monotonic() - since, _how_it_ended(process.exitcode))
                measuring = sum(steps[cell.folder] >= cell.recipe.steps for _, cell, _ in running.values())
                counts = {"training": len(running) - measuring, "measuring": measuring, "waiting": len(waiting)}
                update(sum(steps.values()), **counts)
    except KeyboardInterrupt:
        _stop(started)
        done = sum(cell.results() is not None for cell in cells)
        raise Interrupted(f"stopped with {done} of {len(cells)} runs finished; the others go on from here") from None
    finally:
        _stop(started)
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


def gpus() -> list[str]:
    """The GPUs that may be used, as CUDA and ROCm name them; one without a name where there is none."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        visible = ",".join(str(number) for number in range(torch.cuda.device_count()))
    return visible.split(",")


def report(cell: Cell, seconds: float, how_it_ended: str) -> None:
    """Say what came of a run that has ended; why it failed is written down if it was not."""
    results, reason = cell.results(), cell.run.failure()
    if results is not None:
        values = "  ".join(f"{result.set_label}@{result.length} {result.value:.2f}" for result in results)
        say(f"{cell.label}: {values} ({seconds:.0f} s)")
        return
    if reason is None:
        reason = how_it_ended
        try:
            cell.run.record_failure(reason)
        except OSError as error:
            reason += f" ({error})"
    say(f"{cell.label}: failed: {reason}", style="red")


def _how_it_ended(code: int | None) -> str:
    return f"the process ended with {f'signal {-code}' if code is not None and code < 0 else f'exit code {code}'}"


@contextmanager
def safe_path() -> Iterator[None]:
    """Start processes without the current folder first in their path, where a folder called tra would be taken for this
    package."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


@contextmanager
def _without_main() -> Iterator[None]:
    """A process that is started would run the caller's script again, of which the work here needs nothing."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _stop(processes: Sequence[BaseProcess]) -> None:
    """Ask those still running to save and stop, and wait for them."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join()


def _work(cell: Cell, threads: int, device: str, needed: Sequence[str]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if device:
        os.environ[VISIBLE] = device  # read when CUDA is first used, which is later
    reuse_memory()
    for name in needed:
        plugins.load(name)
    try:
        run_cell(cell)
    except KeyboardInterrupt:
        os._exit(130)


def _end_with_parent() -> None:
    """Save and stop when the process that started this one is gone, even by kill -9."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

"""The report of a grid, `report.html`: at its end, and while it runs."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from tra.errors import RunError
from tra.experiments.base import Cell, Experiment, outcome_of
from tra.files import write_text
from tra.options import written
from tra.progress import say
from tra.report.reporting import Report, RunLine, hours, machine, report_html
from tra.report.tables import Table, comparison_tables
from tra.runs import Run
from tra.runs.folder import folders_of_runs
from tra.tasks import Result

SECONDS_BETWEEN_REPORTS = 5.0
TUNING = "tuning"
"""The folder of runs for tuning."""


def write_report(page: Path, report: Report) -> None:
    write_text(page, report_html(report))


def final_report(
    experiment: Experiment,
    folder: Path,
    cells: Sequence[Cell],
    content: Mapping[str, Any],
    tables: Sequence[Table],
    figures: Mapping[str, str],
) -> Report:
    """What has come of the runs of an experiment, with what was stored as JSON, its tables, and its figures as SVG."""
    tried = folders_of_runs(folder / TUNING)
    about_tuning = [table for table in tables if table.title.startswith("Tuning")]
    return Report(
        title=folder.absolute().name,
        facts=_facts(cells, content),
        tables=[table for table in tables if table not in about_tuning],
        figures=figures,
        failures=content["failures"],
        runs=[_line(cell.label, cell.run, folder, cell.results()) for cell in cells],
        tuning=_protocol(experiment, tried, content["tuning"]),
        tuning_tables=about_tuning,
        tuning_runs=[
            _line(path.relative_to(folder / TUNING).as_posix(), run := Run(path), folder, run.results) for path in tried
        ],
    )


def _facts(cells: Sequence[Cell], content: Mapping[str, Any]) -> dict[str, str]:
    seeds = sorted({cell.recipe.seed for cell in cells})
    columns = {cell.column: cell.recipe for cell in reversed(cells)}
    facts = {
        "runs": f"{content['finished']} of {content['runs']} finished",
        "seeds": ", ".join(map(str, seeds)),
        "training": "\n".join(
            f"{column}: {recipe.steps:,} steps of {recipe.batch} sequences, length {recipe.length:,}, "
            f"{recipe.model.layers} layers, {recipe.model.heads} heads, width {recipe.model.width}"
            for column, recipe in sorted(columns.items())
        ),
    }
    for number, session in enumerate(content["sessions"], 1):
        name = "command" if len(content["sessions"]) == 1 else f"command {number}"
        facts[name] = (
            f"{session['command'] or 'from Python'}\n"
            f"{session['trained']} runs in {hours(session['seconds'])}; {machine(session['environment'])}"
        )
    return facts


def _protocol(experiment: Experiment, tried: Sequence[Path], evidence: Mapping[str, Any]) -> dict[str, str]:
    """How settings were chosen, and what that took."""
    if experiment.tuning is None:
        return {}
    facts = {
        "protocol": "by the loss within the training length, on seeds that are not reported",
        **{
            entry.name: _shown(value)
            for entry in fields(experiment.tuning)
            if entry.name != "rounds" and (value := getattr(experiment.tuning, entry.name)) not in (None, 0.0)
        },
    }
    if len(experiment.tuning.rounds) > 1:
        facts["rounds"] = "; ".join(
            f"{share:.0%} of the steps for {'all' if best is None else f'the best {best}'}"
            for share, best in experiment.tuning.rounds
        )
    recipes = [Run(path).recipe for path in tried]
    if recipes:
        steps = sum(recipe.steps for recipe in recipes)
        facts["budget"] = f"{len(recipes):,} runs of {steps:,} steps together"
    for name, entry in evidence.items():
        facts[f"chosen for {name}"] = _shown(entry["chosen"])
    return facts


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} = {_shown(entry)}" for name, entry in value.items())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return ", ".join(_shown(entry) for entry in value)
    return str(written(value))


def _line(label: str, run: Run, folder: Path, results: Sequence[Result] | None) -> RunLine:
    """A run as it stands on the disk, with what it measured at its end."""
    try:
        curve = [(entry["step"], float(entry["loss"])) for entry in run.metrics()]
        steps = run.recipe.steps
    except (KeyError, OSError, RunError, TypeError, ValueError):  # not begun, or damaged
        curve, steps = [], 0
    step = curve[-1][0] if curve else 0
    state = "finished" if results else "failed" if run.failure() else "running" if curve else "waiting"
    return RunLine(
        label=label,
        folder=run.folder.relative_to(folder).as_posix(),
        state=state,  # type: ignore[arg-type]
        step=step,
        steps=steps,
        curve=curve,
        measured=_measured(results or ()),
    )


def _measured(results: Sequence[Result]) -> str:
    """The measure on each set, length by length."""
    sets: dict[str, list[str]] = {}
    for result in results:
        sets.setdefault(result.place, []).append(f"{result.value:.3g} at {result.length:,}")
    return "\n".join(f"{place}: {', '.join(values)}" for place, values in sets.items())


@contextmanager
def live_report(page: Path, command: str, cells: Sequence[Cell]) -> Iterator[None]:
    """Keep the report up to date while the cells are run in the block: what is done so far, how far the others are.

    The block is what matters: a report that cannot be written stops nothing, and is complained of once.
    """
    live, done = _Live(page, command, cells), threading.Event()
    if all(cell.results() is not None for cell in cells):
        yield  # nothing to be seen
        return

    def keep() -> None:
        while True:
            live.write()
            if done.wait(SECONDS_BETWEEN_REPORTS):
                return

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        live.write(running=False)


class _Live:
    def __init__(self, page: Path, command: str, cells: Sequence[Cell]) -> None:
        self.page, self.folder, self.command, self.cells = page, page.parent, command, cells
        self.began, self.complained = time.monotonic(), False
        self.finished: dict[Cell, list[Result]] = {}
        self.tables: list[Table] = []

    def write(self, running: bool = True) -> None:
        try:
            write_report(self.page, self._report(running))
        except Exception as error:
            if not self.complained:
                say(f"{self.page} cannot be written yet: {error}")
            self.complained = True

    def _report(self, running: bool) -> Report:
        for cell in self.cells:
            if cell not in self.finished and (results := cell.results()) is not None:
                self.finished[cell] = results
                self.tables = []
        if self.finished and not self.tables:
            self.tables = comparison_tables(outcome_of(self.finished).records)
        lines = [_line(cell.label, cell.run, self.folder, self.finished.get(cell)) for cell in self.cells]
        ended = sum(line.state in ("finished", "failed") for line in lines)
        steps, total = sum(line.step for line in lines), sum(cell.recipe.steps for cell in self.cells)
        return Report(
            title=self.folder.absolute().name,
            facts={
                "runs": f"{len(self.finished)} of {len(self.cells)} finished",
                "steps": f"{steps:,} of {total:,}",
                "time": hours(time.monotonic() - self.began),
                **({"command": self.command} if self.command else {}),
            },
            tables=self.tables,
            failures={cell.label: reason for cell in self.cells if (reason := self._failure(cell)) is not None},
            runs=lines,
            progress=f"running: {ended} of {len(self.cells)} runs have ended, {steps / max(1, total):.0%} of the steps"
            if running
            else "",
        )

    def _failure(self, cell: Cell) -> str | None:
        return None if cell in self.finished else cell.run.failure()

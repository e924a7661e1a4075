"""The report of a grid, `report.html`: at its end, and while it runs."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from tra.errors import RunError
from tra.experiments.cells import Cell
from tra.experiments.grid import TUNING, Grid
from tra.experiments.results import Results, records_of
from tra.experiments.tuning import edges_of
from tra.files import write_text
from tra.progress import say
from tra.report.conclusions import conclusions
from tra.report.exploring import explorer
from tra.report.figures import measures_by_step
from tra.report.report_page import Report, RunLine, as_svg, describe_machine, format_duration, report_html
from tra.report.tables import Table, comparison_tables
from tra.runs import Run
from tra.runs.folder import folders_of_runs
from tra.signatures import format_value
from tra.tasks import Result

SECONDS_BETWEEN_REPORTS = 5.0
EXPLORER = "explorer.html"
MOST_EXPLORERS = 24
"""Pages of attention that are made by themselves: each takes a second or two."""


def final_report(
    grid: Grid,
    cells: Mapping[Cell, Sequence[Result] | None],
    results: Results,
    runs: int,
    tables: Sequence[Table],
    tuning_tables: Sequence[Table],
    figures: Mapping[str, str],
) -> Report:
    """What has come of an experiment: its runs that are here, all results, tables, and figures as SVG."""
    tried = [Run(folder) for folder in folders_of_runs(grid.folder / TUNING)]
    lines = {cell: _line(cell.label, cell.run, grid.folder, found) for cell, found in cells.items()}
    finished = {cell: lines[cell] for cell, found in cells.items() if found is not None}
    return Report(
        title=grid.folder.absolute().name,
        facts=_facts(list(cells), results, runs),
        conclusions=conclusions(results.every_record),
        tables=tables,
        figures={**figures, **_training_figures(finished)},
        failures=results.failures,
        runs=list(lines.values()),
        tuning=_protocol(grid, tried, results),
        tuning_tables=tuning_tables,
        tuning_runs=[
            _line(run.folder.relative_to(grid.folder / TUNING).as_posix(), run, grid.folder, run.results)
            for run in tried
        ],
    )


def _training_figures(lines: Mapping[Cell, RunLine]) -> dict[str, str]:
    """What the runs of each column logged, over each other, as SVG by name."""
    columns: dict[str, list[tuple[str, Sequence[Mapping[str, float]]]]] = {}
    for cell, line in lines.items():
        if any(entry.get("loss") for entry in line.metrics):
            columns.setdefault(cell.column, []).append((cell.row, line.metrics))
    return {f"training, {column}": as_svg(measures_by_step(runs, column)) for column, runs in columns.items()}


def write_explorers(cells: Sequence[Cell]) -> None:
    """A page of attention for the first seed of each column and row, where there is none yet and they are few."""
    first = [cell for cell in cells if cell.recipe.seed == 0]
    if len(first) > MOST_EXPLORERS:
        say(f"no pages of attention: {len(first)} are too many; tra inspect RUN --html makes one")
        return
    for cell in first:
        page = cell.run.inspection / EXPLORER
        if page.exists():
            continue
        try:
            explorer(cell.run).save(page)
        except Exception as error:  # a mechanism of a plug-in may raise anything
            say(f"no page of the attention of {cell.label}: {error}")


def _facts(cells: Sequence[Cell], results: Results, runs: int) -> dict[str, str]:
    seeds = sorted({cell.recipe.seed for cell in cells})
    columns = {cell.column: cell.recipe for cell in reversed(cells)}
    facts = {
        "runs": f"{len(results.records)} of {runs} finished",
        "seeds": ", ".join(map(str, seeds)),
        "training": "\n".join(
            f"{column}: {recipe.steps:,} steps of {recipe.batch} sequences, length {recipe.length:,}, "
            f"{recipe.model.layers} layers, {recipe.model.heads} heads, width {recipe.model.width}"
            for column, recipe in sorted(columns.items())
        ),
    }
    for number, session in enumerate(results.sessions, 1):
        name = "command" if len(results.sessions) == 1 else f"command {number}"
        facts[name] = (
            f"{session.command or 'from Python'}\n"
            f"{session.trained} runs in {format_duration(session.seconds)}; {describe_machine(session.environment)}"
        )
    return facts


def _protocol(grid: Grid, tried: Sequence[Run], results: Results) -> dict[str, str]:
    """How settings were chosen, and what that took."""
    tuning = grid.tuning
    if tuning is None:
        return {}
    facts = {
        "protocol": "by the loss within the training length, on seeds that are not reported",
        **{
            entry.name: _shown(value)
            for entry in fields(tuning)
            if entry.name != "rounds" and (value := getattr(tuning, entry.name)) not in (None, 0.0)
        },
    }
    if len(tuning.rounds) > 1:
        facts["rounds"] = "; ".join(
            f"{share:.0%} of the steps for {'all' if best is None else f'the best {best}'}"
            for share, best in tuning.rounds
        )
    if tried:
        steps = sum(run.recipe.steps for run in tried)
        facts["budget"] = f"{len(tried):,} runs of {steps:,} steps together"
    for place, found in results.tuned(grid).items():
        edges = edges_of(found)
        at_edge = f" (at the edge of what was tried: {', '.join(edges)})" if edges else ""
        second = f"; second, as good as tuning can tell: {_shown(found.second)}" if found.second else ""
        facts[f"chosen for {place}"] = _shown(found.chosen) + at_edge + second
    return facts


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} = {_shown(entry)}" for name, entry in value.items())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return ", ".join(_shown(entry) for entry in value)
    return str(format_value(value))


def _line(label: str, run: Run, folder: Path, results: Sequence[Result] | None) -> RunLine:
    """What the folder of a run says, and what it measured at its end."""
    try:
        metrics, steps = run.metrics(), run.recipe.steps
    except (OSError, RunError, ValueError):  # not begun, or damaged
        metrics, steps = [], 0
    page = run.inspection / EXPLORER
    state = "finished" if results else "failed" if run.failure() else "running" if metrics else "waiting"
    return RunLine(
        label=label,
        folder=run.folder.relative_to(folder).as_posix(),
        state=state,  # type: ignore[arg-type]
        steps=steps,
        metrics=metrics,
        measured=_measured(results or ()),
        explorer=page.relative_to(folder).as_posix() if page.exists() else "",
    )


def _measured(results: Sequence[Result]) -> str:
    """The measure on each set, length by length."""
    sets: dict[str, list[str]] = {}
    for result in results:
        sets.setdefault(result.set_label, []).append(f"{result.value:.3g} at {result.length:,}")
    return "\n".join(f"{place}: {', '.join(values)}" for place, values in sets.items())


@contextmanager
def live_report(page: Path, command: str, cells: Sequence[Cell]) -> Iterator[None]:
    """Keep the report up to date while the block runs the cells.

    A report that cannot be written does not stop the block; it is reported once.
    """
    began, done, finished, complained = time.monotonic(), threading.Event(), dict[Cell, list[Result]](), False
    tables: list[Table] = []

    def write(running: bool) -> None:
        nonlocal tables, complained
        try:
            new = {cell: found for cell in cells if cell not in finished and (found := cell.results()) is not None}
            finished.update(new)
            if new:
                tables = comparison_tables([record for pair in finished.items() for record in records_of(*pair)])
            write_text(page, report_html(_so_far(page, command, cells, finished, tables, began, running)))
        except Exception as error:
            if not complained:
                say(f"{page} cannot be written yet: {error}")
            complained = True

    def keep() -> None:
        write(running=True)
        while not done.wait(SECONDS_BETWEEN_REPORTS):
            write(running=True)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        write(running=False)


def _so_far(
    page: Path,
    command: str,
    cells: Sequence[Cell],
    finished: Mapping[Cell, Sequence[Result]],
    tables: Sequence[Table],
    began: float,
    running: bool,
) -> Report:
    lines = [_line(cell.label, cell.run, page.parent, finished.get(cell)) for cell in cells]
    ended = sum(line.state in ("finished", "failed") for line in lines)
    steps, total = sum(line.step for line in lines), sum(cell.recipe.steps for cell in cells)
    failed = {cell.label: cell.run.failure() for cell in cells if cell not in finished}
    return Report(
        title=page.parent.absolute().name,
        facts={
            "runs": f"{len(finished)} of {len(cells)} finished",
            "steps": f"{steps:,} of {total:,}",
            "time": format_duration(time.monotonic() - began),
            **({"command": command} if command else {}),
        },
        tables=tables,
        failures={label: reason for label, reason in failed.items() if reason is not None},
        runs=lines,
        progress=f"running: {ended} of {len(cells)} runs have ended, {steps / max(1, total):.0%} of the steps"
        if running
        else "",
    )

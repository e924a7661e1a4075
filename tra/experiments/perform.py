"""From an experiment to its tables and figures: run what is missing, then make them from what is stored."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from tra.environment import environment
from tra.errors import RunError
from tra.experiments.cells import Cell, Place
from tra.experiments.cluster import run_on_cluster
from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.grid import Grid, part_of
from tra.experiments.grid_report import final_report, live_report, write_explorers
from tra.experiments.local_jobs import run_all, unfinished
from tra.experiments.merge_results import in_current_rows, merge_results, read_results
from tra.experiments.request import Request
from tra.experiments.results import Results, Session, read_runs, records_of, stored_sessions
from tra.experiments.search import Search
from tra.experiments.tuning import Evidence, tuning_losses, tuning_tables
from tra.files import write_json, write_text
from tra.progress import say
from tra.report.figures import save_figure, styled
from tra.report.report_page import as_svg, report_html
from tra.report.tables import comparison_csv, latex, markdown
from tra.tasks import Result


def wanted_runs(experiment: Experiment, request: Request) -> tuple[Search, list[Cell], Results]:
    """The search for settings, the runs to report with the settings before it, and the results that are joined.

    A ValueError says what is wrong with the request.
    """
    grid = Grid.of(experiment, request)
    joined = read_results(request.join, grid)
    search = Search(grid, joined.tuning)
    _ = search.expected  # raises what is wrong with the grid of tuning
    cells = grid.cells()
    if request.shard.of > len(cells):
        raise ValueError(f"shard must be one of at most {len(cells)}, the number of runs, got {request.shard}")
    return search, cells, joined


def perform(experiment: Experiment, request: Request) -> Outcome:
    """Run what this shard lacks, tuning first, then write tables and figures of all finished runs."""
    began, started = datetime.now(UTC), time.monotonic()
    search, cells, joined = wanted_runs(experiment, request)
    grid, page = search.grid, search.grid.folder / experiment.file("report.html")
    grid.folder.mkdir(parents=True, exist_ok=True)
    trained, failures, waits = _tune(search, request, page)
    if waits:
        shown = markdown(tuning_tables(grid.tuning, search.evidence()))
        return Outcome([], [], failures, grid.folder, shown)
    evidence = joined.tuning | search.evidence()
    cells = _with_chosen_settings(cells, grid, evidence, request.train)
    joined = replace(joined, records=in_current_rows(joined.records, grid, evidence))
    _check_runs_here([cell for cell in cells if grid.tuned_on(cell.place) in joined.tuning])
    # Divided among machines before anything is left out, so that all divide alike whatever each of them joins.
    mine = [cell for cell in part_of(cells, *request.shard) if cell.key not in joined.records]
    waited_for = _run(mine, request, grid, page)
    with FileLock(grid.folder / ".lock"):  # one machine at a time, and each sees what the one before it saw
        finished, failed = read_runs(cells)
        sessions = stored_sessions(grid.folder / experiment.file("results.json"))
        trained += len(waited_for & finished.keys())
        if trained:
            seconds = round(time.monotonic() - started, 1)
            sessions.append(Session(request.command, began.isoformat(), trained, seconds, environment()))
        here = Results(
            records={cell.key: records_of(cell, results) for cell, results in finished.items()},
            failures=failures | {str(cell.key): reason for cell, reason in failed.items()},
            tuning=evidence,
            sessions=sessions,
        )
        results = merge_results(here, joined, cells)
        if not results.records:
            reason = next(iter(results.failures.values()), "")
            raise RunError(f"no run in {grid.folder} is finished" + (f": {reason}" if reason else ""))
        own = {cell: finished.get(cell) for cell in cells if cell in finished or cell.key not in joined.records}
        return _write(experiment, request, grid, results, own, len(cells))


def _tune(search: Search, request: Request, page: Path) -> tuple[int, dict[str, str], bool]:
    """Run this shard's part of the search to its end: how many runs were trained, why others failed, and whether it
    must wait for runs of other machines."""
    grid, trained, failures = search.grid, 0, dict[str, str]()
    while cells := search.next():
        waited_for = _run(part_of(cells, *request.shard), request, grid, page)
        finished, failed = read_runs(cells)
        trained += len(waited_for & finished.keys())
        left = len(cells) - len(finished) - len(failed)
        losses, reasons = tuning_losses(finished, failed, ended=not left)
        failures |= reasons
        search.tell(losses)
        if left and request.train:
            if request.shard.of == 1:
                raise RunError(f"tuning in {grid.folder} is not finished")
            say(f"{left} of {len(cells)} runs of tuning are left to other machines")
            return trained, failures, True
    return trained, failures, False


def _with_chosen_settings(
    cells: Sequence[Cell], grid: Grid, evidence: Mapping[Place, Evidence], train: bool
) -> list[Cell]:
    """The runs to report: with the settings that tuning chose, and with the second choice where it could not tell two
    apart. A row whose tuning failed is left out, and reported as a failure."""
    found = []
    for cell in cells:
        known = evidence.get(grid.tuned_on(cell.place))
        if known is None or known.chosen is None:
            found += [] if train and grid.tunes(cell.row) else [cell]
            continue
        first = cell.with_settings(known.chosen)
        if known.second is None:
            found.append(first)
            continue
        second = cell.second(known.second)
        if first.folder_holds(second.recipe):  # more seeds of tuning have swapped the choices
            first, second = replace(first, folder=second.folder), replace(second, folder=first.folder)
        found += [first, second]
    return found


def _write(
    experiment: Experiment,
    request: Request,
    grid: Grid,
    results: Results,
    own: Mapping[Cell, Sequence[Result] | None],
    runs: int,
) -> Outcome:
    """Tables, figures, `results.json`, the explorers of runs that are here, and the page.

    Args:
        experiment: how they are shown.
        request: in which formats.
        grid: where they belong.
        results: all that is known.
        own: the runs that are here or belong here, with what finished ones measured.
        runs: how many there are, here and elsewhere.
    """
    folder, finished = grid.folder, [cell for cell, found in own.items() if found is not None]
    content = results.to_dict(grid, runs)
    outcome = Outcome(finished, results.every_record, results.failures, folder, content=content)
    tables = experiment.tables(outcome)
    evidence = {place: results.tuning[place] for place in grid.places if place in results.tuning}
    of_tuning = tuning_tables(grid.tuning, evidence)
    shown = markdown([*tables, *of_tuning])
    write_text(folder / experiment.file("table.md"), shown)
    write_text(folder / experiment.file("table.tex"), latex([*tables, *of_tuning]))
    write_text(folder / experiment.file("table.csv"), comparison_csv(outcome.records))
    figures: dict[str, str] = {}
    with styled(request.style):
        for name, figure in experiment.figures(outcome).items():
            for kind in request.figures:
                save_figure(figure, folder / f"{name}.{kind}")
            figures[name] = as_svg(figure)
    write_json(folder / experiment.file("results.json"), content)
    write_explorers(finished)
    report = final_report(grid, own, results, runs, tables, of_tuning, figures)
    write_text(folder / experiment.file("report.html"), report_html(report))
    return replace(outcome, shown=shown)


def _run(mine: Sequence[Cell], request: Request, grid: Grid, page: Path) -> set[Cell]:
    """Run this machine's cells, and return those of them that were not finished before."""
    waiting = unfinished(mine) if request.train else []
    if waiting:
        with live_report(page, request.command, mine):
            if request.cluster is None:
                run_all(waiting, request.jobs)
            else:
                run_on_cluster(waiting, request.cluster, request.cluster_options, grid.folder / "cluster")
    return set(waiting)


def _check_runs_here(cells: Sequence[Cell]) -> None:
    """Raise a ValueError if one of these, which were tuned elsewhere, was run here with other settings."""
    for cell in cells:
        if cell.run.exists:
            try:
                cell.run.check_recipe(cell.recipe)
            except ValueError as error:
                raise ValueError(f"join must name results that were tuned as the runs here are, but {error}") from error


__all__ = ["perform", "wanted_runs"]

"""From an experiment to its tables and figures: run what is missing, then make them from what is stored."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from tra.environment import environment
from tra.errors import RunError
from tra.experiments.cells import Cell, Place
from tra.experiments.cluster import run_on_cluster
from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.grid import Grid, part_of
from tra.experiments.grid_report import final_report, live_report, write_explorers
from tra.experiments.local_jobs import run_all, unfinished
from tra.experiments.merge_results import as_tuned, merge_results, read_results
from tra.experiments.request import Request
from tra.experiments.results import FailureKey, Results, Session, TuningKey, first_recipes, read_runs, stored_sessions
from tra.experiments.search import Search
from tra.experiments.tuning import Evidence, Losses, tuning_losses, tuning_tables
from tra.files import write_json, write_text
from tra.progress import say
from tra.report.figures import save_figure, styled
from tra.report.report_page import as_svg, report_html
from tra.report.tables import Table, comparison_csv, latex, markdown
from tra.runs.folder import DIVERGED
from tra.tasks import Result


class Wanted(NamedTuple):
    """What is asked of an experiment, before any of it is done."""

    grid: Grid
    search: Search
    """What tuning tries."""
    cells: list[Cell]
    """The runs to report, as they are before tuning."""
    joined: Results
    """What there is of them elsewhere."""


def wanted_runs(experiment: Experiment, request: Request) -> Wanted:
    """What a request comes to; whatever is wrong with it is raised."""
    grid = Grid.of(experiment, request)
    joined = read_results(request.join, grid)
    search = Search(grid, joined.tuning)
    _ = search.expected  # raises what is wrong with the grid of tuning
    cells = grid.cells()
    if request.shard.of > len(cells):
        raise ValueError(f"shard must be one of at most {len(cells)}, the number of runs, got {request.shard}")
    return Wanted(grid, search, cells, joined)


def perform(experiment: Experiment, request: Request) -> Outcome:
    """Run what is missing of this shard, tuning first, then write tables and figures from what is finished."""
    began, started = datetime.now(UTC), time.monotonic()
    wanted = wanted_runs(experiment, request)
    grid, joined, page = wanted.grid, wanted.joined, wanted.grid.folder / experiment.report_file
    grid.folder.mkdir(parents=True, exist_ok=True)
    tuned = _tune(wanted, request, page)
    if tuned.left:
        say(f"{tuned.left} of {tuned.tried} runs of tuning are left to other machines")
        shown = markdown(tuning_tables(grid.tuning, tuned.evidence))
        return Outcome([], [], _labelled(tuned.failures), grid.folder, shown)
    cells = _with_chosen_settings(wanted.cells, grid, tuned.evidence, request.train)
    joined.records = as_tuned(joined.records, grid, tuned.evidence)
    _check_runs_here([cell for cell in cells if grid.tuned_on(cell.place) in joined.tuning])
    # Divided among machines before anything is left out, so that all divide alike whatever each of them joins.
    mine = [cell for cell in part_of(cells, *request.shard) if cell.key not in joined.records]
    waited_for = _run(mine, request, grid, page)
    with FileLock(grid.folder / ".lock"):  # one machine at a time, and each sees what the one before it saw
        states = read_runs(cells)
        here = Results.of_runs(states)
        here.failures = tuned.failures | here.failures
        here.tuning = tuned.evidence
        here.sessions = stored_sessions(grid.folder / experiment.results_file)
        trained = tuned.trained + len(waited_for & states.finished.keys())
        if trained:
            seconds = round(time.monotonic() - started, 1)
            here.sessions.append(Session(request.command, began.isoformat(), trained, seconds, environment()))
        results = merge_results(here, joined, [cell.key for cell in cells])
        if not results.records:
            reason = next(iter(results.failures.values()), "")
            raise RunError(f"no run in {grid.folder} is finished" + (f": {reason}" if reason else ""))
        results.recipes = first_recipes(cells) | results.recipes
        return _write(experiment, request, wanted._replace(cells=cells), states.finished, results)


class _Tuned(NamedTuple):
    """What tuning has come to."""

    evidence: dict[Place, Evidence]
    failures: dict[FailureKey, str]
    trained: int
    left: int
    """Runs of the last ``tried`` that other machines have to finish before anything is reported."""
    tried: int


def _tune(wanted: Wanted, request: Request, page: Path) -> _Tuned:
    """Run what tuning tries, round by round, as far as other machines allow."""
    search, trained, tried = wanted.search, 0, 0
    failures: dict[FailureKey, str] = {}
    while tries := search.next():
        waited_for = _run(part_of(tries, *request.shard), request, wanted.grid, page)
        found = _tuning_so_far(tries)
        tried = len(tries)
        trained += len(waited_for & found.finished)
        failures |= found.failures
        search.tell(found.losses)
        if found.left and request.train:
            if request.shard.of == 1:
                raise RunError(f"tuning in {wanted.grid.folder} is not finished")
            return _Tuned(search.evidence(), failures, trained, found.left, tried)
    return _Tuned(wanted.joined.tuning | search.evidence(), failures, trained, 0, tried)


def _with_chosen_settings(
    cells: Sequence[Cell], grid: Grid, evidence: Mapping[Place, Evidence], train: bool
) -> list[Cell]:
    """The runs to report: with the settings that tuning chose and, where it could not tell two apart, with the others
    too. A row whose tuning failed is left out: it is reported so, and stops no other."""
    found = []
    for cell in cells:
        known = evidence.get(grid.tuned_on(cell.place))
        if known is None or known.chosen is None:
            found += [] if train and grid.tunes(cell.row) else [cell]
            continue
        first = cell.tuned_to(known.chosen)
        if known.second is None:
            found.append(first)
            continue
        second = cell.second(known.second)
        if first.folder_holds(second.recipe):  # more seeds of tuning have turned first and second round
            first, second = replace(first, folder=second.folder), replace(second, folder=first.folder)
        found += [first, second]
    return found


def _write(
    experiment: Experiment,
    request: Request,
    wanted: Wanted,
    finished: Mapping[Cell, Sequence[Result]],
    results: Results,
) -> Outcome:
    """Tables, figures, `results.json`, the explorers of runs that are here, and the page."""
    grid, cells = wanted.grid, wanted.cells
    outcome = Outcome(
        list(finished),
        results.every_record(),
        _labelled(results.failures),
        grid.folder,
        content=_content(grid, len(cells), results),
    )
    evidence = {place: results.tuning[place] for place in grid.places if place in results.tuning}
    tuning = tuning_tables(grid.tuning, evidence)
    shown = _show(experiment, outcome, tuning, request)
    write_json(grid.folder / experiment.results_file, outcome.content)
    write_explorers(list(finished))
    own = {cell: finished.get(cell) for cell in cells if cell in finished or cell.key not in wanted.joined.records}
    report = final_report(grid, own, results, len(cells), shown.tables, tuning, shown.figures)
    write_text(grid.folder / experiment.report_file, report_html(report))
    return replace(outcome, shown=shown.text)


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


class _Tried(NamedTuple):
    """What is known of runs for tuning."""

    finished: set[Cell]
    losses: Losses
    """Without those of rows whose tuning failed, once no runs are left."""
    failures: dict[FailureKey, str]
    left: int
    """Runs that are neither finished nor failed."""


def _tuning_so_far(tries: Sequence[Cell]) -> _Tried:
    finished, failed = read_runs(tries)
    diverged = [cell for cell, reason in failed.items() if reason.startswith(DIVERGED)]
    losses = tuning_losses(finished, diverged)
    failures: dict[FailureKey, str] = {
        TuningKey(*cell.place, cell.label): reason for cell, reason in failed.items() if cell not in diverged
    }
    left = len(tries) - len(finished) - len(failed)
    if not left:
        for key in failures:
            losses.pop(key.place, None)
    for place, tried in losses.items():
        if not any(math.isfinite(one.loss) for one in tried):
            failures[TuningKey(*place)] = "every choice diverged"
    return _Tried(set(finished), losses, failures, left)


def _check_runs_here(cells: Sequence[Cell]) -> None:
    """Raise a ValueError if one of these, which were tuned elsewhere, was run here with other settings."""
    for cell in cells:
        if cell.run.exists:
            try:
                cell.run.check_recipe(cell.recipe)
            except ValueError as error:
                raise ValueError(f"join must name results that were tuned as the runs here are, but {error}") from error


def _labelled(failures: Mapping[Any, str]) -> dict[str, str]:
    return {str(key): reason for key, reason in failures.items()}


def _content(grid: Grid, runs: int, results: Results) -> dict[str, Any]:
    """What `results.json` holds."""
    tuned_on = {
        place: results.tuning.get(grid.tuned_on(place)) for place in grid.places if place in results.tuned_places
    }
    return {
        "runs": runs,
        "finished": len(results.records),
        "failures": _labelled(results.failures),
        "sessions": [session.to_dict() for session in results.sessions],
        "tuning": {str(place): found.to_dict() for place, found in tuned_on.items() if found and found.chosen},
        "recipes": {column: asdict(recipe) for column, recipe in results.recipes.items()},
        "results": [record.to_dict() for record in results.every_record()],
    }


class _Shown(NamedTuple):
    """Tables and figures as they are shown elsewhere."""

    text: str
    """All tables as Markdown."""
    tables: Sequence[Table]
    """Those of the experiment, without tuning's."""
    figures: Mapping[str, str]
    """SVG by name."""


def _show(experiment: Experiment, outcome: Outcome, tuning: Sequence[Table], request: Request) -> _Shown:
    """Write tables and figures."""
    folder, stem = outcome.folder, experiment.table_stem
    tables = experiment.tables(outcome)
    shown = markdown([*tables, *tuning])
    write_text(folder / f"{stem}.md", shown)
    write_text(folder / f"{stem}.tex", latex([*tables, *tuning]))
    write_text(folder / experiment.records_file, comparison_csv(outcome.records))
    drawn: dict[str, str] = {}
    with styled(request.style):
        for name, figure in experiment.figures(outcome).items():
            for kind in request.figures:
                save_figure(figure, folder / f"{name}.{kind}")
            drawn[name] = as_svg(figure)
    return _Shown(shown, tables, drawn)


__all__ = ["perform", "wanted_runs"]

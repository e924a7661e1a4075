"""From an experiment to its tables and figures: run what is missing, then make them from what is stored."""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from tra.environment import environment
from tra.errors import RunError
from tra.experiments.base import Cell, Experiment, Outcome, outcome_of
from tra.experiments.cluster import CLUSTERS, run_on_cluster
from tra.experiments.grid import run_all
from tra.experiments.joining import (
    Joined,
    all_records,
    all_rounds,
    joined_results,
    tuned_elsewhere,
)
from tra.experiments.reporting import final_report, live_report, write_report
from tra.experiments.tuning import Losses, Search, chosen_settings, tuning_evidence, tuning_losses, tuning_tables
from tra.files import write_json, write_text
from tra.lookup import lookup
from tra.progress import say
from tra.recipes import Recipe
from tra.report.figures import FORMATS, save_figure, styled
from tra.report.reporting import as_svg
from tra.report.tables import Table, comparison_csv, latex, markdown
from tra.tasks import Result


@dataclass(frozen=True)
class Request:
    """What is asked of an experiment, besides what it says itself."""

    folder: Path
    scale: str
    seeds: int | None = None
    attention: Sequence[str] = ()
    """Rows or mechanisms; all of the experiment by default."""
    columns: Sequence[str] = ()
    """Columns; all of the experiment by default."""
    jobs: int = 1
    """Runs at the same time."""
    shard: tuple[int, int] = (1, 1)
    """This machine's part of the runs, of how many."""
    train: bool = True
    """False: make tables and figures from what is stored."""
    cluster: str | None = None
    cluster_options: Mapping[str, Any] = field(default_factory=dict)
    formats: Sequence[str] = ("png",)
    style: str | None = None
    """A style sheet of matplotlib, by name or path."""
    join: Sequence[Path] = ()
    """Files with results of the same experiment from elsewhere, to be shown with those that are here. What was tuned
    there is not tuned again, and what was run there is not run again."""
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        index, count = self.shard
        if not 1 <= index <= count:
            raise ValueError(f"shard must be i/n with 1 <= i <= n, got {index}/{count}")
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"output must be a folder, but {self.folder} is a file")
        for kind in self.formats:
            lookup(dict.fromkeys(FORMATS), kind, "figures")
        if self.cluster is not None:
            lookup(dict.fromkeys(CLUSTERS), self.cluster, "cluster")
        with styled(self.style):
            pass  # a wrong one is found before anything is trained


class Wanted(NamedTuple):
    """What is asked of an experiment, before any of it is done."""

    search: Search
    """What tuning tries."""
    cells: list[Cell]
    """The runs to report, as they are before tuning."""
    joined: Joined
    """What there is of them elsewhere."""

    def not_joined(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those of these runs that there are not elsewhere."""
        stored = {(record.column, record.row, record.seed) for record in self.joined.records}
        return [cell for cell in cells if (cell.column, cell.row, cell.recipe.seed) not in stored]


def wanted_runs(experiment: Experiment, request: Request) -> Wanted:
    """What a request comes to; whatever is wrong with it is raised.

    Of an experiment as it is at the scale and with the columns asked for.
    """
    seeds, rows = request.seeds or experiment.seeds, experiment.chosen_rows(request.attention)
    if experiment.tuning is not None and set(experiment.tuning.seeds) & set(range(seeds)):
        raise ValueError(f"seeds of tuning must not be among the {seeds} that are reported")
    joined = joined_results(request.join, experiment, request.scale, rows, seeds)
    if joined.more_seeds:
        say(f"what is joined has more seeds than are shown; --seeds {max(joined.more_seeds) + 1} takes them in")
    search = Search(experiment, request.folder, request.scale, rows, joined.by_column)
    _ = search.expected  # raises what is wrong with the grid
    cells = experiment.cells(request.folder, request.scale, seeds, rows)
    index, count = request.shard
    if count > len(cells):
        raise ValueError(f"shard must be one of at most {len(cells)}, the number of runs, got {index}/{count}")
    return Wanted(search, cells, joined)


def perform(experiment: Experiment, request: Request) -> Outcome:
    """Run what is missing of this shard, tuning first, then write tables and figures from what is finished."""
    began, started = datetime.now(UTC), time.monotonic()
    experiment = experiment.at(request.scale, request.columns)
    wanted = wanted_runs(experiment, request)
    search, cells = wanted.search, wanted.cells
    rows, seeds = experiment.chosen_rows(request.attention), request.seeds or experiment.seeds
    places = [(column, row.label) for column in experiment.columns(request.scale) for row in rows]
    request.folder.mkdir(parents=True, exist_ok=True)
    missing: list[Cell] = []
    spoilt: dict[str, str] = {}
    while tries := search.next():
        missing += _missing(part_of(tries, *request.shard), request, experiment.report_file)
        losses, failed, left = _tuning_so_far(tries)
        spoilt |= failed
        search.tell(losses)
        if left and request.train:
            if request.shard[1] == 1:
                raise RunError(f"tuning in {request.folder} is not finished")
            say(f"{left} of {len(tries)} runs of tuning are left to other machines")
            return Outcome([], [], spoilt, request.folder, markdown(tuning_tables(experiment, search.rounds)))
    last = search.rounds[-1] if search.rounds else {}
    chosen = chosen_settings(experiment, list(experiment.columns(request.scale)), search.choices, last)
    elsewhere = tuned_elsewhere(experiment, wanted.joined, places)
    chosen |= {place: evidence["chosen"] for place, evidence in elsewhere.items()}
    # A row whose tuning failed is reported so, and stops no other.
    undecided = {cell for cell in cells if experiment.tunes(cell.row) and (cell.column, cell.row) not in chosen}
    cells = [
        cell.tuned_to(chosen.get((cell.column, cell.row)))
        for cell in cells
        if cell not in undecided or not request.train
    ]
    _check_runs_here([cell for cell in cells if (cell.column, cell.row) in elsewhere])
    # Divided among machines before anything is left out, so that all divide alike whatever each of them joins.
    mine = wanted.not_joined(part_of(cells, *request.shard))
    missing += _missing(mine, request, experiment.report_file)
    with FileLock(request.folder / ".lock"):  # one machine at a time, and each sees what the one before it saw
        finished = _finished(cells)
        outcome = outcome_of(finished)
        joined = joined_results(request.join, experiment, request.scale, rows, seeds, outcome.records)
        failures = {**joined.failures, **spoilt, **_failures(wanted.not_joined(cells))}
        if not finished and not joined.records:
            reason = next(iter(failures.values()), "")
            raise RunError(f"no run in {request.folder} is finished" + (f": {reason}" if reason else ""))
        trained = sum(cell.results() is not None for cell in missing)
        session = {
            "command": request.command,
            "began": began.isoformat(),
            "trained": trained,
            "seconds": round(time.monotonic() - started, 1),
            "environment": environment(),
        }
        records = all_records(outcome.records, joined, places)
        reported = {(record.column, record.row) for record in records}  # not what is still being tuned
        chosen = {key: settings for key, settings in chosen.items() if key in reported}
        outcome = replace(outcome, records=records)
        rounds = all_rounds(search.rounds, joined, places)
        evidence = tuning_evidence(experiment, search.rounds, chosen)
        evidence |= {" ".join(place): of_place for place, of_place in elsewhere.items() if place in reported}
        stored = request.folder / experiment.results_file
        content = {
            "runs": len(cells),
            "finished": len({(record.column, record.row, record.seed) for record in records}),
            "failures": failures,
            "sessions": _different([*joined.sessions, *_sessions(stored), *([session] if trained else [])]),
            "tuning": {label: evidence[label] for label in map(" ".join, places) if label in evidence},
            "recipes": {**_first_recipes(cells), **joined.recipes, **_first_recipes(finished)},
            "results": [record.to_dict() for record in records],
        }
        shown = _show(experiment, outcome, tuning_tables(experiment, rounds), request)
        write_json(stored, content)
        here = dict.fromkeys([*finished, *wanted.not_joined(cells)])
        own = [cell for cell in cells if cell in here]
        report = final_report(experiment, request.folder, own, content, shown.tables, shown.figures)
        write_report(request.folder / experiment.report_file, report)
    return replace(outcome, failures=failures, folder=request.folder, shown=shown.text, content=content)


def _check_runs_here(cells: Sequence[Cell]) -> None:
    """Raise a ValueError if one of these, which were tuned elsewhere, was run here with other settings."""
    for cell in cells:
        if cell.run.exists:
            try:
                cell.run.check_recipe(cell.recipe)
            except ValueError as error:
                raise ValueError(f"join must name results that were tuned as the runs here are, but {error}") from error


def _missing(mine: Sequence[Cell], request: Request, report_file: str) -> list[Cell]:
    """Run this machine's cells, and return those of them that were not finished before."""
    missing = [cell for cell in mine if cell.results() is None]
    if request.train and mine:
        with live_report(request.folder / report_file, request.command, mine):
            if request.cluster is None:
                run_all(mine, request.jobs)
            else:
                run_on_cluster(mine, request.cluster, request.cluster_options, request.folder / "cluster")
    return missing


def _finished(cells: Sequence[Cell]) -> dict[Cell, list[Result]]:
    return {cell: results for cell in cells if (results := cell.results()) is not None}


def _tuning_so_far(tries: Sequence[Cell]) -> tuple[Losses, dict[str, str], int]:
    """The losses, without those of rows whose tuning failed once no runs are left; why they did; how many are left."""
    finished = _finished(tries)
    diverged = [cell for cell in tries if cell not in finished and cell.run.diverged]
    unfinished = [cell for cell in tries if cell not in finished and cell not in diverged]
    losses = tuning_losses(finished, diverged)
    failures = {f"{label} (tuning)": reason for label, reason in _failures(unfinished).items()}
    left = len(unfinished) - len(failures)
    for cell in unfinished if not left else ():
        losses.pop((cell.column, cell.row), None)
    for (column, row), choices in losses.items():
        if not any(map(math.isfinite, choices.values())):
            failures[f"{column} {row} (tuning)"] = "every choice diverged"
    return losses, failures, left


def _failures(cells: Sequence[Cell]) -> dict[str, str]:
    return {
        cell.label: reason for cell in cells if cell.results() is None and (reason := cell.run.failure()) is not None
    }


def _first_recipes(cells: Iterable[Cell]) -> dict[str, dict[str, Any]]:
    """Of each column, that of its first row and seed."""
    found: dict[str, Recipe] = {}
    for cell in cells:
        found.setdefault(cell.column, cell.recipe)
    return {column: asdict(recipe) for column, recipe in found.items()}


def _show(experiment: Experiment, outcome: Outcome, tuning: Sequence[Table], request: Request) -> "_Shown":
    """Write tables and figures."""
    folder, stem = request.folder, experiment.table_stem
    tables = [*experiment.tables(outcome), *tuning]
    shown = markdown(tables)
    write_text(folder / f"{stem}.md", shown)
    write_text(folder / f"{stem}.tex", latex(tables))
    write_text(folder / experiment.records_file, comparison_csv(outcome.records))
    drawn: dict[str, str] = {}
    with styled(request.style):
        for name, figure in experiment.figures(outcome).items():
            for kind in request.formats:
                save_figure(figure, folder / f"{name}.{kind}")
            drawn[name] = as_svg(figure)
    return _Shown(shown, tables, drawn)


class _Shown(NamedTuple):
    """Tables and figures as they are shown elsewhere."""

    text: str
    """The tables as Markdown."""
    tables: Sequence[Table]
    figures: Mapping[str, str]
    """SVG by name."""


def _sessions(results: Path) -> list[dict[str, Any]]:
    """What was measured before, and where."""
    try:
        return json.loads(results.read_text(encoding="utf-8"))["sessions"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _different(sessions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each once, known by when it began: what was joined before is in the file that is written anew."""
    return [session for place, session in enumerate(sessions) if session not in sessions[:place]]


def part_of(cells: Sequence[Cell], index: int, count: int) -> list[Cell]:
    """The index-th of count parts, none of which holds all runs of a row."""
    width = len({cell.row for cell in cells})
    shift = 1 if width % count == 0 else 0  # else every row would begin with the same part
    return [cell for place, cell in enumerate(cells) if (place + shift * (place // width)) % count == index - 1]


__all__ = ["Request", "part_of", "perform", "wanted_runs"]

"""The contract of an experiment: which runs there are, and how they are shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tra.experiments.cells import Cell, file_name
from tra.experiments.request import Request
from tra.experiments.rows import Row, as_row
from tra.experiments.tuning import Tuning
from tra.lookup import lookup
from tra.recipes import RecipeOf
from tra.report.figures import measure_by_length
from tra.report.records import Record, grouped
from tra.report.tables import Table, comparison_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Outcome:
    """What an experiment has come to: its finished runs and what they measured."""

    cells: Sequence[Cell]
    """Finished."""
    records: Sequence[Record]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Of unfinished runs, why."""
    folder: Path = Path()
    shown: str = ""
    """The table, as it is to be printed."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """What was stored as JSON."""


def default_tables(outcome: Outcome) -> list[Table]:
    return comparison_tables(outcome.records)


def default_figures(outcome: Outcome) -> dict[str, "Figure"]:
    """The measure against length, a figure for each column."""
    return {
        f"{'accuracy' if mine[0].result.averages else mine[0].result.measure}-{file_name(column)}": measure_by_length(
            mine, column
        )
        for column, mine in grouped(outcome.records, lambda record: record.column).items()
    }


@dataclass(frozen=True)
class Experiment:
    """Which runs, and how they are shown.

    Args:
        scales: for each scale ("smoke", "small", "paper", or any name) the columns: a recipe of each, as a function of
            the mechanism's name.
        rows: what is compared, mechanisms by name or :class:`Row` with options.
        seeds: runs of each kind, with seeds 0, 1, ..., unless asked for others.
        tuning: settings to choose for each row first.
        at_scale: fields of this class that are others at a scale, e.g. ``{"paper": {"seeds": 4}}``.
        tables: makes the tables; comparisons of everything by default.
        figures: makes the figures, by name; the measure against length by default.
        stem: the name of its files, without suffixes, if another experiment has the usual ones in the same folder:
            ``results.json``, ``table.md``, ``table.tex``, ``table.csv`` and ``report.html``.
    """

    scales: Mapping[str, Mapping[str, RecipeOf]]
    rows: Sequence[Row | str]
    seeds: int = 1
    tuning: Tuning | None = None
    at_scale: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tables: Callable[[Outcome], list[Table]] = default_tables
    figures: Callable[[Outcome], dict[str, "Figure"]] = default_figures
    stem: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.rows, str):
            raise ValueError(f"rows must be a list of names or Rows, got {self.rows!r}")
        rows = [as_row(row) for row in self.rows]
        if not rows or not self.scales or not all(self.scales.values()):
            raise ValueError("an experiment must have at least one row, one scale and one column in each")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        _check_names("rows", [row.label for row in rows])
        for columns in self.scales.values():
            _check_names("columns", list(columns))
        if self.tuning is not None:
            for label in self.tuning.rows or ():
                lookup(dict.fromkeys(row.label for row in rows), label, "rows of tuning")
            for row in rows:
                both = sorted(set(row.changes) & {*self.tuning.grid, *row.tuned})
                if both:
                    raise ValueError(f"row {row.label!r} must not set what is tuned, got {', '.join(both)}")

    def file(self, usual: str) -> str:
        """The name of a file that is usually called so."""
        return f"{self.stem}{Path(usual).suffix}" if self.stem else usual

    def perform(self, request: Request) -> Outcome:
        """Run what is missing, and write tables and figures."""
        from tra.experiments.perform import perform  # which works on experiments

        return perform(self, request)

    def plan(self, request: Request) -> Table:
        """What it would take."""
        from tra.experiments.plan import plan

        return plan(self, request)

    @property
    def usual_scale(self) -> str:
        return "small" if "small" in self.scales else next(iter(self.scales))


def _check_names(what: str, labels: Sequence[str]) -> None:
    """Each has results and folders of its own."""
    taken: dict[str, str] = {}
    for label in labels:
        name = file_name(label)
        if name in taken:
            other = "twice" if taken[name] == label else f"and {label!r}, whose folders would be the same"
            raise ValueError(f"{what} must have different names, got {taken[name]!r} {other}")
        taken[name] = label

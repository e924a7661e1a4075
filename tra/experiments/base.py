"""The contract of an experiment: which runs there are, and how they are shown."""

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tra import plugins
from tra.attention import MECHANISMS
from tra.errors import RunError
from tra.lookup import lookup
from tra.options import written
from tra.recipes import Recipe, RecipeOf
from tra.report.figures import measure_by_length
from tra.report.records import Record, grouped
from tra.report.tables import Table, comparison_tables
from tra.runs import Run
from tra.tasks import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tra.experiments.perform import Request

SCALES = ("smoke", "small", "paper")


@dataclass(frozen=True)
class Row:
    """What is compared: a mechanism, its options, and other changes to the recipes.

    Example:
        >>> Row("rope", {"theta": 10_000}).label
        'rope theta=10000'
        >>> Row("rope", changes={"model.layers": 2}).label
        'rope model.layers=2'
    """

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of fields of the recipe; those of the model have names such as ``model.width``."""
    name: str = ""
    """What the row is called; the mechanism with its options and changes by default."""

    def __post_init__(self) -> None:
        if "seed" in self.changes:
            raise ValueError("changes must leave the seed alone: an experiment gives each run its own")

    @property
    def label(self) -> str:
        return self.name or " ".join([self.attention, *_settings({**self.options, **self.changes})])

    def recipe(self, recipe_of: RecipeOf, seed: int) -> Recipe:
        """A column's recipe as this row has it."""
        recipe = recipe_of(attention=self.attention)
        options = {**recipe.model.attention_options, **self.options}
        return recipe.changed({"model.attention_options": options, **self.changes, "seed": seed})


def sweep(rows: Iterable[Row | str], fields: Mapping[str, Sequence[Any]]) -> tuple[Row, ...]:
    """Every row with every combination of values of fields of the recipe.

    Example:
        >>> [row.label for row in sweep(["tra"], {"model.layers": (2, 4)})]
        ['tra model.layers=2', 'tra model.layers=4']
    """
    return tuple(
        replace(row, changes={**row.changes, **dict(zip(fields, values, strict=True))})
        for row in map(as_row, rows)
        for values in itertools.product(*fields.values())
    )


def as_row(row: Row | str) -> Row:
    return Row(row) if isinstance(row, str) else row


def choice_label(choice: Mapping[str, Any]) -> str:
    return " ".join(_settings(choice))


def _settings(values: Mapping[str, Any]) -> list[str]:
    """Options by their own names, other fields by those that `Recipe.changed` knows."""
    return [f"{name.removeprefix('model.attention_options.')}={written(value)}" for name, value in values.items()]


@dataclass(frozen=True)
class Tuning:
    """Settings that are chosen for each row before anything is reported: by the loss within the training length, on
    seeds that are not reported."""

    grid: Mapping[str, Sequence[Any]]
    """Values of fields of the recipe; every combination is tried."""
    seeds: Sequence[int] = (1000,)
    column: str | None = None
    """Tune on this column for all of them; by default each is tuned by itself."""
    rows: Collection[str] | None = None
    """Labels of the rows to tune; all by default. Tables mark the others."""
    rounds: Sequence[tuple[float, int | None]] = ((1.0, None),)
    """Successive halving: the share of the steps that each round trains for, and how many of the best choices of the
    round before it tries, None for all. The last round decides."""
    extended: str | None = None
    """A field of the grid, with numbers from low to high, that goes on by the same factor for as long as the best
    choice of the first round has the first or last of them, up to `MOST_EXTENSIONS` times."""
    tolerance: float = 0.0
    """Losses of the last round that exceed the lowest by no more than this are as good as it: of such choices the one
    with the lowest value of `extended` is taken, as the one that is least likely to fail with another seed."""

    def __post_init__(self) -> None:
        if not self.grid or not all(self.grid.values()):
            raise ValueError(f"grid must name fields of a recipe and values for each, got {self.grid!r}")
        if "seed" in self.grid:
            raise ValueError("grid must leave the seed alone: seeds says which to tune on")
        if not self.seeds:
            raise ValueError("seeds must name at least one seed to tune on, got none")
        if not self.rounds or not all(0.0 < share <= 1.0 and (n is None or n > 0) for share, n in self.rounds):
            raise ValueError(f"rounds must each have a share of the steps and a number of choices, got {self.rounds!r}")
        if not 0.0 <= self.tolerance < math.inf or (self.tolerance and self.extended is None):
            raise ValueError(f"tolerance must be at least 0, and 0 without extended, got {self.tolerance}")
        if self.extended is not None:
            values = lookup(self.grid, self.extended, "extended")
            if len(values) < 2 or any(low >= high for low, high in itertools.pairwise(values)) or values[0] <= 0:
                raise ValueError(f"{self.extended} must have two or more rising values to be extended, got {values!r}")

    def choices(self) -> list[dict[str, Any]]:
        """Every combination of the grid."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def beyond(self, tried: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> dict[str, Any] | None:
        """The choice past the best one, if that lies at an end of what was tried of the extended field."""
        if self.extended is None or len(tried) >= len(self.choices()) + MOST_EXTENSIONS:
            return None
        values, at = sorted({choice[self.extended] for choice in tried}), best[self.extended]
        if values[0] < at < values[-1]:
            return None
        beside = values[1] if at == values[0] else values[-2]
        return {**best, self.extended: float(f"{at * at / beside:.3g}")}


MOST_EXTENSIONS = 3


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    column: str
    row: str
    recipe: Recipe
    folder: Path
    tuned: bool = True
    choice: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of a run for tuning: the settings that it tries."""
    share: float = 1.0
    """Of a run for tuning: the part of the steps that it trains for."""

    @property
    def label(self) -> str:
        steps = [] if self.share == 1.0 else [f"steps={self.recipe.steps}"]
        return " ".join([self.column, self.row, *steps, *_settings(self.choice), f"seed {self.recipe.seed}"])

    @property
    def choice_label(self) -> str:
        return choice_label(self.choice)

    def tuned_to(self, settings: Mapping[str, Any] | None) -> "Cell":
        """The same run with the settings that tuning chose, if it did."""
        return self if settings is None else replace(self, recipe=self.recipe.changed(settings), tuned=True)

    @property
    def run(self) -> Run:
        return Run(self.folder)

    def results(self) -> list[Result] | None:
        """What was measured, or None if the run of this recipe is not finished; `problem` says whether it can be."""
        try:
            return self.run.finished(self.recipe)
        except (OSError, RunError, ValueError):
            return None

    def problem(self) -> str | None:
        """What is wrong with the run that is there: one of something else, say, or of a plug-in that is not loaded."""
        try:
            if self.run.exists:
                self.run.finished(self.recipe)
        except (OSError, RunError, ValueError) as error:
            return str(error)
        return None


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


def outcome_of(finished: Mapping[Cell, Sequence[Result]]) -> Outcome:
    """The records of finished runs."""
    records = []
    for cell, results in finished.items():
        recipe, unit = cell.recipe, cell.recipe.build_task().unit
        settings = {"learning_rate": recipe.learning_rate, "options": dict(recipe.model.attention_options)}
        records += [
            Record(cell.column, cell.row, recipe.seed, recipe.length, unit, result, cell.tuned, settings)
            for result in results
        ]
    return Outcome(list(finished), records)


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
        tuned: at each scale, the rows whose settings the recipes have from earlier tuning; where there is no such entry
            and no tuning, tables say that nothing was tuned.
        tables: makes the tables; comparisons of everything by default.
        figures: makes the figures, by name; the measure against length by default.
        results_file: what the file with all results is called.
        table_stem: what the files with tables are called, without their suffixes.
        records_file: what the CSV with all figures is called.
        report_file: what the page to look at is called.
    """

    scales: Mapping[str, Mapping[str, RecipeOf]]
    rows: Sequence[Row | str]
    seeds: int = 1
    tuning: Tuning | None = None
    at_scale: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tuned: Mapping[str, Collection[str]] = field(default_factory=dict)
    tables: Callable[[Outcome], list[Table]] = default_tables
    figures: Callable[[Outcome], dict[str, "Figure"]] = default_figures
    results_file: str = "results.json"
    table_stem: str = "table"
    records_file: str = "table.csv"
    report_file: str = "report.html"

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
                both = sorted(set(row.changes) & set(self.tuning.grid))
                if both:
                    raise ValueError(f"row {row.label!r} must not set what is tuned, got {', '.join(both)}")

    def perform(self, request: "Request") -> Outcome:
        """Run what is missing, and write tables and figures."""
        from tra.experiments.perform import perform  # which works on experiments

        return perform(self, request)

    def plan(self, request: "Request") -> Table:
        """What it would take."""
        from tra.experiments.plan import plan

        return plan(self, request)

    @property
    def usual_scale(self) -> str:
        return "small" if "small" in self.scales else next(iter(self.scales))

    def chosen_rows(self, names: Sequence[str]) -> list[Row]:
        """Those of these names, or of these mechanisms; a mechanism that is not among the rows becomes one."""
        rows = [as_row(row) for row in self.rows]
        if not names:
            return rows
        chosen: list[Row] = []
        for name in names:
            found = [row for row in rows if name == row.label] or [row for row in rows if name == row.attention]
            if not found:
                lookup(
                    {**dict.fromkeys(row.label for row in rows), **plugins.every("MECHANISMS", MECHANISMS)},
                    name,
                    "attention",
                )
            chosen += found or [Row(name)]
        return list(dict.fromkeys(chosen))

    def columns(self, scale: str) -> Mapping[str, RecipeOf]:
        return lookup(self.scales, scale, "scale")

    def at(self, scale: str, columns: Sequence[str] = ()) -> "Experiment":
        """As it is at one scale, with these columns alone; with all if none are named."""
        known = self.columns(scale)
        chosen = {name: lookup(known, name, "columns") for name in columns} or known
        tuning = self.at_scale.get(scale, {}).get("tuning", self.tuning)
        if tuning is not None and tuning.column in known and tuning.column not in chosen:
            raise ValueError(f"columns must hold {tuning.column}, on which all are tuned, got {', '.join(chosen)}")
        return replace(self, scales={scale: chosen}, **self.at_scale.get(scale, {}), at_scale={})

    def cells(self, folder: Path, scale: str, seeds: int, rows: Sequence[Row]) -> list[Cell]:
        """All runs that are reported, a whole table for one seed before the next seed, so that a part of them says
        something; before anything is tuned."""
        known = self.tuned.get(scale, ())
        first = [
            Cell(
                column,
                row.label,
                row.recipe(recipe_of, 0),
                _below(folder / "runs", column, row.label, "0"),
                tuned=row.label in known,
            )
            for column, recipe_of in self.columns(scale).items()
            for row in rows
        ]
        others = [
            replace(cell, recipe=replace(cell.recipe, seed=seed), folder=cell.folder.with_name(str(seed)))
            for seed in range(1, seeds)
            for cell in first
        ]
        return first + others

    def tunes(self, row: str) -> bool:
        """Whether the settings of a row are chosen first."""
        return self.tuning is not None and (self.tuning.rows is None or row in self.tuning.rows)

    def tuning_cells(
        self,
        folder: Path,
        scale: str,
        rows: Sequence[Row],
        share: float = 1.0,
        choices: Callable[[str, str], Sequence[Mapping[str, Any]]] | None = None,
    ) -> list[Cell]:
        """Runs from which settings are chosen: of all choices, or of those that a function of column and row gives,
        trained for a share of the steps."""
        tuning = self.tuning
        if tuning is None:
            return []
        columns = self.columns(scale)
        if tuning.column is not None:
            columns = {tuning.column: lookup(columns, tuning.column, "column")}
        tried = choices or (lambda column, row: tuning.choices())
        return [
            Cell(
                column,
                row.label,
                _shortened(row.recipe(recipe_of, seed).changed(choice), share),
                _below(folder / "tuning", column, row.label, *_part(share), choice_label(choice), str(seed)),
                choice=choice,
                share=share,
            )
            for seed in tuning.seeds
            for column, recipe_of in columns.items()
            for row in rows
            if self.tunes(row.label)
            for choice in tried(column, row.label)
        ]


def _below(folder: Path, *labels: str) -> Path:
    return folder.joinpath(*map(file_name, labels))


def _part(share: float) -> list[str]:
    return [] if share == 1.0 else [f"{share:g} of the steps"]


def _shortened(recipe: Recipe, share: float) -> Recipe:
    """For tuning: so much of the training, measured within its length on the first of its sets, which is like what is
    trained on; the others are no business of tuning."""
    first = [entry for entry in recipe.evaluations if entry.name == recipe.evaluations[0].name]
    within = tuple(entry for entry in first if entry.length <= recipe.length)
    return replace(recipe, steps=max(1, round(recipe.steps * share)), evaluations=within or recipe.evaluations)


def file_name(label: str) -> str:
    """A label as the name of a file or folder, which never begins with a dot."""
    name = "".join(sign if sign.isalnum() or sign in "-+_.=," else "-" for sign in label)
    return re.sub(r"^\.+", lambda dots: "-" * len(dots[0]), name)


def _check_names(what: str, labels: Sequence[str]) -> None:
    """Each has results and folders of its own."""
    taken: dict[str, str] = {}
    for label in labels:
        name = file_name(label)
        if name in taken:
            other = "twice" if taken[name] == label else f"and {label!r}, whose folders would be the same"
            raise ValueError(f"{what} must have different names, got {taken[name]!r} {other}")
        taken[name] = label

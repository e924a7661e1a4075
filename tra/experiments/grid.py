"""The grid of runs: what an experiment and a request together ask for, with all defaults filled in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tra import plugins
from tra.attention import MECHANISMS
from tra.attention.naming import mechanism_names
from tra.experiments.cells import Cell, Place, below
from tra.experiments.experiment import Experiment
from tra.experiments.request import Request
from tra.experiments.rows import Row, Settings, as_row, choice_label
from tra.experiments.tuning import Tuning
from tra.lookup import lookup
from tra.recipes import Recipe, RecipeOf

RUNS, TUNING = "runs", "tuning"
"""The folders of runs that are reported, and of runs for tuning."""

Choices = Callable[[Place], Sequence[Settings]]
"""The settings that are tried for a column and row."""


@dataclass(frozen=True)
class Grid:
    """Which runs there are."""

    folder: Path
    scale: str
    columns: Mapping[str, RecipeOf]
    rows: Sequence[Row]
    every_row: Sequence[Row]
    """Those of the experiment, of which `rows` may be some."""
    seeds: int
    tuning: Tuning | None
    _built: dict[Place, Recipe] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, experiment: Experiment, request: Request) -> "Grid":
        """The runs of a request; whatever is wrong with it is raised."""
        scale = request.scale or experiment.usual_scale
        known = lookup(experiment.scales, scale, "scale")
        here = replace(experiment, **experiment.at_scale.get(scale, {}))
        columns = {name: lookup(known, name, "columns") for name in request.columns} or known
        if here.tuning is not None and here.tuning.column in known and here.tuning.column not in columns:
            raise ValueError(
                f"columns must hold {here.tuning.column}, on which all are tuned, got {', '.join(columns)}"
            )
        if request.folder is None:
            raise ValueError("folder must be given")
        rows = chosen_rows(experiment.rows, request.attention)
        if request.changes:
            taken = {name for row in rows for name in {**row.changes, **row.tuned}}
            taken |= set(here.tuning.grid if here.tuning else ())
            for name in request.changes:
                if name in taken:
                    raise ValueError(f"set must leave {name} alone: rows or tuning of this experiment decide on it")
            columns = {name: _adjusted(recipe_of, request.changes) for name, recipe_of in columns.items()}
        return cls(
            folder=request.folder,
            scale=scale,
            columns=columns,
            rows=rows,
            every_row=list(map(as_row, here.rows)),
            seeds=request.seeds or here.seeds,
            tuning=here.tuning,
        )

    def __post_init__(self) -> None:
        if self.tuning is not None and set(self.tuning.seeds) & set(range(self.seeds)):
            raise ValueError(f"seeds of tuning must not be among the {self.seeds} that are reported")

    @property
    def places(self) -> list[Place]:
        """Columns and rows, in the order of tables."""
        return [Place(column, row.label) for column in self.columns for row in self.rows]

    def recipe(self, column: str, row: Row, seed: int) -> Recipe:
        """A column's recipe as a row has it, built once: every seed and every round of tuning starts from it."""
        place = Place(column, row.label)
        if place not in self._built:
            self._built[place] = row.recipe(self.columns[column], 0)
        return self._built[place] if seed == 0 else replace(self._built[place], seed=seed)

    def cells(self) -> list[Cell]:
        """All runs that are reported, with the settings before tuning. A whole table of one seed comes before the next
        seed, so that the first part of the runs is of use by itself."""
        return [
            Cell(
                column,
                row.label,
                self.recipe(column, row, seed),
                below(self.folder / RUNS, column, row.label, str(seed)),
            )
            for seed in range(self.seeds)
            for column in self.columns
            for row in self.rows
        ]

    def tunes(self, row: str) -> bool:
        """Whether the settings of a row are chosen first."""
        return self.tuning is not None and (self.tuning.rows is None or row in self.tuning.rows)

    def tuned_fields(self, row: Row) -> set[str]:
        """The fields of a row's recipes that tuning chooses."""
        return {*self.tuning.grid, *row.tuned} if self.tuning is not None and self.tunes(row.label) else set()

    def tuned_on(self, place: Place) -> Place:
        """Where the settings of a column and row are chosen."""
        place = place.first_choice
        return place if self.tuning is None or self.tuning.column is None else place._replace(column=self.tuning.column)

    def choices(self, place: Place) -> list[Settings]:
        """Everything that is tried for a column and row at first."""
        assert self.tuning is not None
        return self.tuning.choices(next(row.tuned for row in self.rows if row.label == place.row))

    def tuning_cells(
        self, index: int = 0, choices: Choices | None = None, seeds: Sequence[int] | None = None
    ) -> list[Cell]:
        """The runs of a round of tuning: all choices, or those that a function of the place gives; with the seeds of
        the round, or others."""
        tuning = self.tuning
        if tuning is None:
            return []
        columns = list(self.columns)
        if tuning.column is not None:
            lookup(self.columns, tuning.column, "column")
            columns = [tuning.column]
        tried, (share, _) = choices or self.choices, tuning.rounds[index]
        part = [] if share == 1.0 else [f"{share:g} of the steps"]
        return [
            Cell(
                column,
                row.label,
                _shortened(column, self.recipe(column, row, seed).changed(choice), share),
                below(self.folder / TUNING, column, row.label, *part, choice_label(choice), str(seed)),
                choice=choice,
                share=share,
            )
            for seed in (tuning.seeds_of(index) if seeds is None else seeds)
            for column in columns
            for row in self.rows
            if self.tunes(row.label)
            for choice in tried(Place(column, row.label))
        ]


def chosen_rows(every: Sequence[Row | str], names: Sequence[str]) -> list[Row]:
    """The rows of these names, or of these mechanisms; a mechanism that is not among the rows becomes one."""
    rows = list(map(as_row, every))
    if not names:
        return rows
    chosen: list[Row] = []
    for name in names:
        found = [row for row in rows if name == row.label] or [row for row in rows if name == row.attention]
        if not found:
            known = {**dict.fromkeys(row.label for row in rows), **plugins.every("MECHANISMS", MECHANISMS)}
            for part in mechanism_names(name):
                lookup(known, part, "attention")
        chosen += found or [Row(name)]
    return list(dict.fromkeys(chosen))


def _adjusted(recipe_of: RecipeOf, changes: Settings) -> RecipeOf:
    """The recipes of a column with other values of fields."""
    return lambda attention: recipe_of(attention=attention).adjusted(changes)


def _shortened(column: str, recipe: Recipe, share: float) -> Recipe:
    """For tuning: this share of the steps, measured within the training length on the first set, which is like the
    training data."""
    first = [entry for entry in recipe.evaluations if entry.name == recipe.evaluations[0].name]
    within = tuple(entry for entry in first if entry.length <= recipe.length)
    if not within:
        measured = ", ".join(f"{entry.name} at {entry.length}" for entry in first) or "nothing"
        raise ValueError(
            f"{column} must be measured within the training length of {recipe.length}, because tuning goes by the loss "
            f"there, got {measured}; Recipe.adjusted changes the length and scales the evaluations with it"
        )
    return replace(recipe, steps=max(1, round(recipe.steps * share)), evaluations=within)


def part_of(cells: Sequence[Cell], index: int, count: int) -> list[Cell]:
    """The index-th of count parts. Where every column has the same rows, none holds all runs of a row."""
    width = len({cell.row for cell in cells})
    shift = 1 if width % count == 0 else 0  # else every row would begin with the same part
    return [cell for place, cell in enumerate(cells) if (place + shift * (place // width)) % count == index - 1]

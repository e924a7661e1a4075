"""Results of an experiment: one typed store, filled from run folders and from files, written to `results.json`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tra.experiments.cells import Cell, Place, RunKey
from tra.experiments.grid import Grid
from tra.experiments.tuning import Evidence
from tra.files import read_json
from tra.recipes import Recipe
from tra.report.records import Record
from tra.tasks import Result


@dataclass(frozen=True)
class Session:
    """One call that trained something."""

    command: str
    began: str | None
    """None in files of version 0.1."""
    trained: int
    seconds: float
    environment: Mapping[str, Any]

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Session":
        required = [stored[name] for name in ("trained", "seconds", "environment")]
        return cls(stored["command"], stored.get("began"), *required)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Results:
    """What is known of an experiment's runs."""

    records: dict[RunKey, list[Record]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Of runs without records, and of tuning, why; by what they are called."""
    tuning: dict[Place, Evidence] = field(default_factory=dict)
    """By the column that a row was tuned on."""
    sessions: list[Session] = field(default_factory=list)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """One of each column: that of its first row and seed."""

    @property
    def every_record(self) -> list[Record]:
        return [record for records in self.records.values() for record in records]

    def tuned(self, grid: Grid) -> dict[Place, Evidence]:
        """How settings were chosen, for every column and row of which something was measured."""
        measured = {key.place.first_choice for key in self.records}
        found = {place: self.tuning.get(grid.tuned_on(place)) for place in grid.places if place in measured}
        return {place: evidence for place, evidence in found.items() if evidence is not None and evidence.chosen}

    def to_dict(self, grid: Grid, runs: int) -> dict[str, Any]:
        """The content of `results.json`.

        Args:
            grid: what was asked for.
            runs: how many there are, finished or not.
        """
        return {
            "runs": runs,
            "finished": len(self.records),
            "failures": self.failures,
            "sessions": [session.to_dict() for session in self.sessions],
            "tuning": {str(place): asdict(found) for place, found in self.tuned(grid).items()},
            "recipes": {column: asdict(recipe) for column, recipe in self.recipes.items()},
            "results": [record.to_dict() for record in self.every_record],
        }


def read_runs(cells: Iterable[Cell]) -> tuple[dict[Cell, list[Result]], dict[Cell, str]]:
    """What finished runs measured, and why others failed; each is looked at once."""
    finished: dict[Cell, list[Result]] = {}
    failed: dict[Cell, str] = {}
    for cell in cells:
        if (results := cell.results()) is not None:
            finished[cell] = results
        elif (reason := cell.run.failure()) is not None:
            failed[cell] = reason
    return finished, failed


def records_of(cell: Cell, results: Sequence[Result]) -> list[Record]:
    recipe, unit, options = cell.recipe, cell.recipe.build_task().unit, cell.recipe.model.attention_options
    return [
        Record(*cell.key, recipe.length, unit, result, cell.tuned, recipe.learning_rate, options) for result in results
    ]


def first_recipes(cells: Iterable[Cell]) -> dict[str, Recipe]:
    """Of each column, that of its first row and seed."""
    found: dict[str, Recipe] = {}
    for cell in cells:
        found.setdefault(cell.column, cell.recipe)
    return found


def stored_sessions(path: Path) -> list[Session]:
    """The calls that a file tells of; none if it is not there or damaged: it is written anew."""
    try:
        return list(map(Session.from_dict, read_json(path)["sessions"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []

"""Results of an experiment: one typed store, filled from run folders and from files, written to `results.json`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tra.experiments.cells import Cell, Place, RunKey
from tra.experiments.tuning import Evidence
from tra.files import read_json
from tra.recipes import Recipe
from tra.report.records import Record
from tra.tasks import Result


class TuningKey(NamedTuple):
    """What fails in tuning: all of it for a column and row, or one attempt."""

    column: str
    row: str
    attempt: str = ""

    @property
    def place(self) -> Place:
        return Place(self.column, self.row)

    def __str__(self) -> str:
        return f"{self.attempt or self.place} (tuning)"


FailureKey = RunKey | TuningKey


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


class RunStates(NamedTuple):
    """How runs stand on the disk."""

    finished: dict[Cell, list[Result]]
    failures: dict[Cell, str]
    """Of runs that are not finished and failed, why."""


def read_runs(cells: Iterable[Cell]) -> RunStates:
    """Look at each run once."""
    states = RunStates({}, {})
    for cell in cells:
        if (results := cell.results()) is not None:
            states.finished[cell] = results
        elif (reason := cell.run.failure()) is not None:
            states.failures[cell] = reason
    return states


@dataclass
class Results:
    """What is known of an experiment's runs."""

    records: dict[RunKey, list[Record]] = field(default_factory=dict)
    failures: dict[FailureKey, str] = field(default_factory=dict)
    """Of runs without records, why."""
    tuning: dict[Place, Evidence] = field(default_factory=dict)
    """By the column that a row was tuned on."""
    sessions: list[Session] = field(default_factory=list)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """One of each column: that of its first row and seed."""

    @classmethod
    def of_runs(cls, states: RunStates) -> "Results":
        return cls(
            records={cell.key: records_of(cell, results) for cell, results in states.finished.items()},
            failures={cell.key: reason for cell, reason in states.failures.items()},
            recipes=first_recipes(states.finished),
        )

    def every_record(self) -> list[Record]:
        return [record for records in self.records.values() for record in records]

    @property
    def tuned_places(self) -> set[Place]:
        """Columns and rows of which something was measured, with the first choice of tuning or the second."""
        return {key.place.tuned_as for key in self.records}


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

"""What one run of an experiment measured on one set, and where it belongs."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tra.tasks import Result

Key = TypeVar("Key")
SECOND = " (second choice)"
"""Ends the label of a row that has the next best settings, where tuning could not tell them from the best."""


@dataclass(frozen=True)
class Record:
    """One result in a comparison."""

    column: str
    """Which recipe of the experiment, usually the name of a task."""
    row: str
    """The mechanism, with its options and whatever else was changed."""
    seed: int
    trained: int
    """The training length."""
    unit: str
    """What lengths count."""
    result: Result
    tuned: bool = True
    """Whether the settings were chosen for this mechanism."""
    learning_rate: float = math.nan
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the mechanism."""

    def to_dict(self) -> dict[str, Any]:
        """As `results.json` has it, where a row is called attention."""
        return {
            "column": self.column,
            "attention": self.row,
            "seed": self.seed,
            "tuned": self.tuned,
            "learning_rate": self.learning_rate,
            "options": dict(self.options),
            "measure": self.result.measure,
            **self.result.to_dict(),
        }


def without_second(label: str) -> str:
    """The label of the row that a row of second choices belongs to; any other as it is."""
    return label.removesuffix(SECOND)


def grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """Records by key, in the order in which the keys come."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups

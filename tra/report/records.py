"""What one run of an experiment measured on one set, and where it belongs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tra.tasks import Result

Key = TypeVar("Key")


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
    settings: dict[str, Any] = field(default_factory=dict)
    """What else of the recipe a reader of the results should know."""

    def to_dict(self) -> dict[str, Any]:
        where = {"column": self.column, "attention": self.row, "seed": self.seed, "tuned": self.tuned}
        return {**where, **self.settings, "measure": self.result.measure, **self.result.to_dict()}


def grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """Records by key, in the order in which the keys come."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups

"""Cells: the single runs of an experiment, and the keys by which they are known everywhere."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tra.errors import RunError
from tra.experiments.rows import Settings, choice_label, settings_words
from tra.recipes import Recipe
from tra.report.records import SECOND, without_second
from tra.runs import Run
from tra.tasks import Result


class Place(NamedTuple):
    """Where a result stands in a table."""

    column: str
    row: str

    @property
    def first_choice(self) -> "Place":
        """Itself, or of second choices the place of the first."""
        return self._replace(row=without_second(self.row))

    def __str__(self) -> str:
        return f"{self.column} {self.row}"


class RunKey(NamedTuple):
    """One run that is reported."""

    column: str
    row: str
    seed: int

    @property
    def place(self) -> Place:
        return Place(self.column, self.row)

    def __str__(self) -> str:
        return f"{self.column} {self.row} seed {self.seed}"


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    column: str
    row: str
    recipe: Recipe
    folder: Path
    tuned: bool = False
    """Whether tuning chose its settings."""
    choice: Settings = field(default_factory=dict, hash=False)
    """Of a run for tuning: the settings that it tries."""
    share: float = 1.0
    """Of a run for tuning: the part of the steps that it trains for."""

    @property
    def place(self) -> Place:
        return Place(self.column, self.row)

    @property
    def key(self) -> RunKey:
        return RunKey(self.column, self.row, self.recipe.seed)

    @property
    def label(self) -> str:
        steps = [] if self.share == 1.0 else [f"steps={self.recipe.steps}"]
        return " ".join([str(self.place), *steps, *settings_words(self.choice), f"seed {self.recipe.seed}"])

    @property
    def choice_label(self) -> str:
        return choice_label(self.choice)

    def with_settings(self, settings: Settings | None) -> "Cell":
        """The same run with the settings that tuning chose, if it did."""
        return self if settings is None else replace(self, recipe=self.recipe.changed(settings), tuned=True)

    def second(self, settings: Settings) -> "Cell":
        """The same run with the settings that tuning could not tell from those it chose, in a row of its own."""
        folder = self.folder.parent.with_name(file_name(self.row + SECOND)) / self.folder.name
        return replace(self.with_settings(settings), row=self.row + SECOND, folder=folder)

    def folder_holds(self, recipe: Recipe) -> bool:
        """Whether its folder holds a run of this recipe."""
        try:
            return self.run.exists and self.run.recipe == recipe
        except (OSError, RunError, ValueError):
            return False

    @property
    def run(self) -> Run:
        return Run(self.folder)

    def results(self) -> list[Result] | None:
        """What was measured, or None if the run of this recipe is not finished."""
        return self.read()[0]

    def read(self) -> tuple[list[Result] | None, str | None]:
        """What was measured, and what is wrong with the run that is there: it cannot be read, say, or needs a plug-in
        that is not loaded."""
        try:
            return self.run.finished(self.recipe), None
        except (OSError, RunError, ValueError) as error:
            return None, str(error) if self.run.exists else None


def below(folder: Path, *labels: str) -> Path:
    return folder.joinpath(*map(file_name, labels))


def file_name(label: str) -> str:
    """A label as the name of a file or folder, which never begins with a dot."""
    name = "".join(sign if sign.isalnum() or sign in "-+_.=," else "-" for sign in label)
    return re.sub(r"^\.+", lambda dots: "-" * len(dots[0]), name)

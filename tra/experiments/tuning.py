"""Choosing settings: by the loss within the training length, never by what lies past it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tra.experiments.base import Cell, Experiment, Row
from tra.report.intervals import spread
from tra.report.tables import Table
from tra.tasks import Result

Losses = dict[tuple[str, str], dict[str, float]]
"""For a column and row, the loss of each choice."""


Choices = Callable[[str, str], Sequence[Mapping[str, Any]]]
"""What is to be tried for a column and row."""


def _always(choices: Sequence[Mapping[str, Any]], column: str, row: str) -> Sequence[Mapping[str, Any]]:
    return choices


class Search:
    """What tuning tries: told the losses of what it gave last, it gives the next runs, and none at the end."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        scale: str,
        rows: Sequence[Row],
        elsewhere: Collection[tuple[str, str]] = (),
    ) -> None:
        """Of columns and rows that are tuned elsewhere nothing is tried."""
        self.experiment, self.where, self.left_out = experiment, (folder, scale, rows), set(elsewhere)
        self.rounds: list[Losses] = []
        """Of each round so far, the losses."""
        self.choices: dict[str, Mapping[str, Any]] = {}
        """Everything that was tried, by its label."""
        self.extending = False
        self.extensions: set[str] = set()
        """Runs past the ends of the grid that were given already: one that comes to nothing is not given again."""

    def next(self) -> list[Cell]:
        tuning = self.experiment.tuning
        if tuning is None:
            return []
        if len(self.rounds) == 1:
            cells = [cell for cell in self._cells(0, self._beyond()) if cell.label not in self.extensions]
            self.extensions |= {cell.label for cell in cells}
            self.extending = bool(cells)
            if cells:
                return cells
        if len(self.rounds) == len(tuning.rounds):
            return []
        return self._cells(len(self.rounds), self._best(tuning.rounds[len(self.rounds)][1]) if self.rounds else None)

    def tell(self, losses: Losses) -> None:
        """Add what was found: a round of its own, or more of the first."""
        if self.extending:
            for key, found in losses.items():
                self.rounds[0].setdefault(key, {}).update(found)
        else:
            self.rounds.append(losses)

    @cached_property
    def expected(self) -> list[Cell]:
        """About what it comes to, before anything is known: of each later round the first choices."""
        tuning = self.experiment.tuning
        if tuning is None:
            return []
        cells, left = [], tuning.choices()
        for index, (_, most) in enumerate(tuning.rounds):
            left = left[:most]
            cells += self._cells(index, partial(_always, left))
        return cells

    def _cells(self, index: int, choices: Choices | None) -> list[Cell]:
        tuning = self.experiment.tuning
        assert tuning is not None
        cells = self.experiment.tuning_cells(*self.where, tuning.rounds[index][0], choices)
        cells = [cell for cell in cells if (cell.column, cell.row) not in self.left_out]
        self.choices |= {cell.choice_label: cell.choice for cell in cells}
        return cells

    def _best(self, number: int | None) -> Choices:
        """For a column and row, so many choices with the lowest losses of the last round."""

        def best(column: str, row: str) -> list[Mapping[str, Any]]:
            losses = self.rounds[-1].get((column, row), {})
            finite = [label for label in losses if math.isfinite(losses[label])]
            return [self.choices[label] for label in sorted(finite, key=losses.__getitem__)[:number]]

        return best

    def _beyond(self) -> Choices:
        """For a column and row, the choice past the best one, if the grid has to be extended."""
        tuning = self.experiment.tuning
        assert tuning is not None

        def beyond(column: str, row: str) -> list[Mapping[str, Any]]:
            losses = self.rounds[0].get((column, row), {})
            best = self._best(1)(column, row)
            further = tuning.beyond([self.choices[label] for label in losses], best[0]) if best else None
            return [further] if further is not None else []

        return beyond


def tuning_losses(measured: Mapping[Cell, Sequence[Result]], diverged: Sequence[Cell] = ()) -> Losses:
    """Mean loss within the training length, over sets and seeds, of every choice; infinite for one that diverged."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for cell in diverged:
        found.setdefault((cell.column, cell.row), {}).setdefault(cell.choice_label, []).append(math.inf)
    for cell, results in measured.items():
        within = [result.loss for result in results if result.length <= cell.recipe.length]
        if not within:
            raise ValueError(f"{cell.column} must be measured within the training length of {cell.recipe.length}")
        found.setdefault((cell.column, cell.row), {}).setdefault(cell.choice_label, []).extend(within)
    return {key: {choice: spread(losses)[0] for choice, losses in choices.items()} for key, choices in found.items()}


def best_choices(losses: Losses) -> dict[tuple[str, str], str]:
    """The choice with the lowest loss; one whose loss is not a number is the worst."""

    def badness(loss: float) -> float:
        return math.inf if math.isnan(loss) else loss

    return {key: min(choices, key=lambda choice: badness(choices[choice])) for key, choices in losses.items()}


def chosen_settings(
    experiment: Experiment, columns: Sequence[str], choices: Mapping[str, Mapping[str, Any]], losses: Losses
) -> dict[tuple[str, str], dict[str, Any]]:
    """The settings that every column and row is reported with: those of the label with the lowest loss, or of one
    that is as good."""
    tuning = experiment.tuning
    if tuning is None:
        return {}

    extended, tolerance = tuning.extended, tuning.tolerance

    def preferred(tried: Mapping[str, float], lowest: str) -> str:
        if extended is None:
            return lowest
        good = [label for label, loss in tried.items() if loss <= tried[lowest] + tolerance]
        return min(good, key=lambda label: (choices[label][extended], tried[label]))

    best = {
        key: dict(choices[preferred(losses[key], label)])
        for key, label in best_choices(losses).items()
        if math.isfinite(losses[key][label])
    }
    if tuning.column is None:
        return best
    return {(column, row): settings for (_, row), settings in best.items() for column in columns}


def tuning_evidence(
    experiment: Experiment, rounds: Sequence[Losses], chosen: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, Any]:
    """What was chosen for every column and row, and why, to be stored with the results."""
    tuning = experiment.tuning
    if tuning is None:
        return {}
    return {
        f"{column} {row}": {
            "column": tuning.column or column,
            "seeds": list(tuning.seeds),
            "rounds": [
                {"share_of_steps": share, "losses": losses.get((tuning.column or column, row), {})}
                for (share, _), losses in zip(tuning.rounds, rounds, strict=False)
            ],
            "chosen": dict(settings),
        }
        for (column, row), settings in chosen.items()
    }


def tuning_tables(experiment: Experiment, rounds: Sequence[Losses]) -> list[Table]:
    """One for each round."""
    tuning = experiment.tuning
    if tuning is None:
        return []
    tables = [tuning_table(losses, share) for (share, _), losses in zip(tuning.rounds, rounds, strict=False) if losses]
    if len(tables) == len(tuning.rounds) and tuning.tolerance:
        taken = f" Taken is the lowest {tuning.extended} among losses at most {tuning.tolerance:g} above it."
        tables[-1] = replace(tables[-1], note=tables[-1].note + taken)
    return tables


def tuning_table(losses: Losses, share: float = 1.0) -> Table:
    """The loss of every choice, the lowest marked; one at the edge of the grid may not be the best there is."""
    choices = list(dict.fromkeys(choice for row in losses.values() for choice in row))
    best = best_choices(losses)
    several = len({column for column, _ in losses}) > 1
    rows, marked = [], set()
    for y, ((column, row), by_choice) in enumerate(losses.items()):
        rows.append(
            [f"{column} {row}" if several else row]
            + [f"{by_choice[choice]:.4f}" if choice in by_choice else "" for choice in choices]
        )
        marked.add((y, 1 + choices.index(best[column, row])))
    note = "Mean loss within the training length; the lowest is bold."
    title = "Tuning" if share == 1.0 else f"Tuning, {share:g} of the steps"
    return Table(["attention", *choices], rows, title, note, frozenset(marked))

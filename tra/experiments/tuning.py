"""Choosing settings: by the loss within the training length, never by what lies past it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tra.experiments.base import Cell, Experiment
from tra.report.intervals import spread
from tra.report.tables import Table
from tra.tasks import Result

Losses = dict[tuple[str, str], dict[str, float]]
"""For a column and row, the loss of each choice."""


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
    experiment: Experiment, columns: Sequence[str], cells: Sequence[Cell], losses: Losses
) -> dict[tuple[str, str], dict[str, Any]]:
    """The settings that every column and row is reported with."""
    tuning = experiment.tuning
    if tuning is None:
        return {}
    by_label = {cell.choice_label: dict(cell.choice) for cell in cells}
    best = {key: by_label[label] for key, label in best_choices(losses).items() if math.isfinite(losses[key][label])}
    if tuning.column is None:
        return best
    return {(column, row): settings for (_, row), settings in best.items() for column in columns}


def tuning_evidence(
    experiment: Experiment, losses: Losses, chosen: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, Any]:
    """What was chosen for every column and row, and why, to be stored with the results."""
    tuning = experiment.tuning
    if tuning is None:
        return {}
    return {
        f"{column} {row}": {
            "column": tuning.column or column,
            "seeds": list(tuning.seeds),
            "losses": losses[tuning.column or column, row],
            "chosen": dict(settings),
        }
        for (column, row), settings in chosen.items()
    }


def tuning_table(losses: Losses) -> Table:
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
    note = "Mean loss within the training length; the lowest, which is taken, is bold."
    return Table(["attention", *choices], rows, "Tuning", note, frozenset(marked))

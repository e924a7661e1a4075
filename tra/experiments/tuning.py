"""Tuning: settings are chosen by the loss within the training length, never by what lies past it."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tra.experiments.cells import Cell, Place
from tra.lookup import lookup
from tra.report.intervals import spread
from tra.report.tables import Table
from tra.tasks import Result

Losses = dict[Place, dict[str, float]]
"""For a column and row, the loss of each choice by its label."""
Settings = Mapping[str, Any]
"""Values of fields of a recipe."""


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
class Round:
    """One round of tuning for a column and row."""

    share_of_steps: float
    losses: Mapping[str, float]
    """Of each choice that was tried, by its label."""


@dataclass(frozen=True)
class Evidence:
    """How settings were chosen, as it is stored with the results."""

    column: str
    """On which they were tuned."""
    seeds: list[int]
    rounds: list[Round]
    chosen: Settings | None
    """None while nothing is decided, or where every choice failed."""

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Evidence":
        rounds = [Round(part["share_of_steps"], part["losses"]) for part in stored["rounds"]]
        return cls(stored["column"], list(stored["seeds"]), rounds, dict(stored["chosen"]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tuning_losses(measured: Mapping[Cell, Sequence[Result]], diverged: Iterable[Cell] = ()) -> Losses:
    """Mean loss within the training length, over sets and seeds, of every choice; infinite for one that diverged."""
    found: dict[Place, dict[str, list[float]]] = {}
    for cell in diverged:
        found.setdefault(cell.place, {}).setdefault(cell.choice_label, []).append(math.inf)
    for cell, results in measured.items():
        within = [result.loss for result in results if result.length <= cell.recipe.length]
        if not within:
            raise ValueError(f"{cell.column} must be measured within the training length of {cell.recipe.length}")
        found.setdefault(cell.place, {}).setdefault(cell.choice_label, []).extend(within)
    return {place: {choice: spread(losses)[0] for choice, losses in tried.items()} for place, tried in found.items()}


def best_choice(losses: Mapping[str, float]) -> str:
    """The choice with the lowest loss; one whose loss is not a number is the worst."""
    return min(losses, key=lambda choice: math.inf if math.isnan(losses[choice]) else losses[choice])


def chosen_settings(
    tuning: Tuning, choices: Mapping[str, Settings], losses: Mapping[str, float]
) -> dict[str, Any] | None:
    """The settings with the lowest loss, or of a choice that is as good; None where every choice diverged."""
    lowest = best_choice(losses)
    if not math.isfinite(losses[lowest]):
        return None
    extended = tuning.extended
    if extended is not None:
        good = [label for label, loss in losses.items() if loss <= losses[lowest] + tuning.tolerance]
        lowest = min(good, key=lambda label: (choices[label][extended], losses[label]))
    return dict(choices[lowest])


def edges_of(evidence: Evidence) -> list[str]:
    """The settings whose chosen value is the least or the greatest that was tried: a better one may lie beyond."""
    tried: dict[str, set[float]] = {}
    for part in evidence.rounds:
        for label in part.losses:
            for word in label.split(" "):
                name, _, text = word.partition("=")
                try:
                    tried.setdefault(name, set()).add(float(text))
                except ValueError:
                    continue  # no number
    return [
        name
        for name, value in (evidence.chosen or {}).items()
        if len(values := tried.get(name.removeprefix("model.attention_options."), set())) > 1
        and not isinstance(value, bool | str)
        and value in (min(values), max(values))
    ]


def tuning_tables(tuning: Tuning | None, evidence: Mapping[Place, Evidence]) -> list[Table]:
    """One for each round."""
    if tuning is None:
        return []
    tables = []
    for index, (share, _) in enumerate(tuning.rounds):
        parts = {place: found.rounds[index].losses for place, found in evidence.items() if index < len(found.rounds)}
        losses = {place: dict(tried) for place, tried in parts.items() if tried}
        if losses:
            tables.append(tuning_table(losses, share))
    if len(tables) == len(tuning.rounds) and tuning.tolerance:
        taken = f" Taken is the lowest {tuning.extended} among losses at most {tuning.tolerance:g} above it."
        tables[-1] = replace(tables[-1], note=tables[-1].note + taken)
    return tables


def tuning_table(losses: Losses, share: float = 1.0) -> Table:
    """The loss of every choice, the lowest marked; one at the edge of the grid may not be the best there is."""
    choices = list(dict.fromkeys(choice for tried in losses.values() for choice in tried))
    several = len({place.column for place in losses}) > 1
    rows, marked = [], set()
    for y, (place, tried) in enumerate(losses.items()):
        cells = [f"{tried[choice]:.4f}" if choice in tried else "" for choice in choices]
        rows.append([str(place) if several else place.row, *cells])
        marked.add((y, 1 + choices.index(best_choice(tried))))
    note = "Mean loss within the training length; the lowest is bold."
    title = "Tuning" if share == 1.0 else f"Tuning, {share:g} of the steps"
    return Table(["attention", *choices], rows, title, note, frozenset(marked))

"""Tuning: settings are chosen by the loss within the training length, never by what lies past it."""

import itertools
import math
import statistics
from ast import literal_eval
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tra.experiments.cells import Cell, Place
from tra.experiments.rows import OPTION, Settings, choice_label
from tra.lookup import lookup
from tra.report.tables import Table
from tra.runs.folder import DIVERGED
from tra.tasks import Result


@dataclass(frozen=True)
class Tuning:
    """Settings that are chosen for each row before anything is reported: by the loss within the training length, on
    seeds that are not reported."""

    grid: Mapping[str, Sequence[Any]]
    """Values of fields of the recipe; every combination is tried."""
    seeds: Sequence[int] = (1000,)
    """The last round trains with each of these, rounds before it with the first. With several, it is known how much
    seeds differ: where the two best choices differ by less, both are reported."""
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

    def choices(self, besides: Mapping[str, Sequence[Any]] | None = None) -> list[Settings]:
        """Every combination of the grid, and of what is tuned besides."""
        grid = {**self.grid, **(besides or {})}
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def seeds_of(self, index: int) -> Sequence[int]:
        """The seeds of a round."""
        return self.seeds if index == len(self.rounds) - 1 else self.seeds[:1]

    def beyond(self, tried: Sequence[Settings], best: Settings, planned: int) -> Settings | None:
        """The choice past the best one, if that lies at an end of what was tried of the extended field, unless many
        more than were planned have been tried already."""
        if self.extended is None or len(tried) >= planned + MOST_EXTENSIONS:
            return None
        values, at = sorted({choice[self.extended] for choice in tried}), best[self.extended]
        if values[0] < at < values[-1]:
            return None
        beside = values[1] if at == values[0] else values[-2]
        return {**best, self.extended: float(f"{at * at / beside:.3g}")}


MOST_EXTENSIONS = 3


@dataclass(frozen=True)
class Tried:
    """A choice and its losses."""

    settings: Settings
    losses: Sequence[float]
    """Within the training length, of each seed; infinite where training diverged."""

    @property
    def label(self) -> str:
        return choice_label(self.settings)

    @property
    def loss(self) -> float:
        """The mean over seeds; one that is not a number counts as infinite."""
        mean = statistics.fmean(self.losses)
        return math.inf if math.isnan(mean) else mean

    @property
    def spread(self) -> float:
        """How much seeds differ; 0 of one seed."""
        return max(self.losses) - min(self.losses) if math.isfinite(self.loss) else math.inf


Losses = dict[Place, list[Tried]]
"""For a column and row, what was tried."""


@dataclass(frozen=True)
class Round:
    """One round of tuning for a column and row."""

    share_of_steps: float
    tried: Sequence[Tried]

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], chosen: Settings) -> "Round":
        """What `asdict` gave; files of 0.2 have a loss by each label in place of what was tried."""
        if "losses" in stored:
            tried = [Tried(_settings(label, chosen), [loss]) for label, loss in stored["losses"].items()]
        else:
            tried = [Tried(part["settings"], part["losses"]) for part in stored["tried"]]
        return cls(stored["share_of_steps"], tried)


def _settings(label: str, alike: Settings) -> Settings:
    """The settings that a label names, with the fields of others."""
    words = dict(word.split("=", 1) for word in label.split(" "))
    return {name: _value(words[name.removeprefix(OPTION)]) for name in alike}


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True)
class Evidence:
    """How settings were chosen, as it is stored with the results."""

    column: str
    """On which they were tuned."""
    seeds: Sequence[int]
    """Of the last round."""
    rounds: Sequence[Round]
    chosen: Settings | None
    """None while nothing is decided, or where every choice failed."""
    second: Settings | None = None
    """The next best choice, where it differs from the chosen one by less than seeds do."""

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Evidence":
        chosen = dict(stored["chosen"])
        rounds = [Round.from_dict(part, chosen) for part in stored["rounds"]]
        return cls(stored["column"], list(stored["seeds"]), rounds, chosen, stored.get("second"))


def evidence_of(tuning: Tuning, column: str, rounds: Sequence[Round], decided: bool = True) -> Evidence:
    """The evidence of these rounds. The last one decides, unless it was not run."""
    chosen, second = choose(tuning, rounds[-1].tried) if decided else (None, None)
    trained = min((len(one.losses) for one in rounds[-1].tried), default=len(tuning.seeds))
    return Evidence(column, list(tuning.seeds)[:trained], rounds, chosen, second)


def tuning_losses(
    measured: Mapping[Cell, Sequence[Result]], failed: Mapping[Cell, str] = MappingProxyType({}), ended: bool = True
) -> tuple[Losses, dict[str, str]]:
    """The mean loss within the training length of every choice and seed, infinite if it diverged; and the reasons of
    other failures, by run. Once all runs have ended, a column and row with such a failure has no losses."""
    diverged = [cell for cell, reason in failed.items() if reason.startswith(DIVERGED)]
    runs = dict.fromkeys(diverged, math.inf)
    for cell, results in measured.items():
        within = [result.loss for result in results if result.length <= cell.recipe.length]
        if not within:
            raise ValueError(f"{cell.column} must be measured within the training length of {cell.recipe.length}")
        runs[cell] = statistics.fmean(within)
    found: dict[Place, dict[str, Tried]] = {}
    for cell, loss in sorted(runs.items(), key=lambda run: run[0].recipe.seed):
        tried = found.setdefault(cell.place, {})
        before = tried[cell.choice_label].losses if cell.choice_label in tried else []
        tried[cell.choice_label] = Tried(cell.choice, [*before, loss])
    others = {cell: reason for cell, reason in failed.items() if cell not in runs}
    failures = {f"{cell.label} (tuning)": reason for cell, reason in others.items()}
    spoilt = {cell.place for cell in others} if ended else set()
    losses = {place: list(tried.values()) for place, tried in found.items() if place not in spoilt}
    for place, choices in losses.items():
        if not any(math.isfinite(one.loss) for one in choices):
            failures[f"{place} (tuning)"] = "every choice diverged"
    return losses, failures


def choose(tuning: Tuning, tried: Sequence[Tried]) -> tuple[Settings | None, Settings | None]:
    """The settings with the lowest loss, within the tolerance, or None if every choice diverged; and the second best if
    it is worse by less than seeds differ, so that tuning cannot tell the two apart."""
    ranked = sorted(tried, key=lambda one: one.loss)
    lowest = ranked[0]
    if not math.isfinite(lowest.loss):
        return None, None
    extended, taken = tuning.extended, lowest
    if extended is not None:
        good = [one for one in ranked if one.loss <= lowest.loss + tuning.tolerance]
        taken = min(good, key=lambda one: (one.settings[extended], one.loss))
    others = [one for one in ranked if one is not taken and math.isfinite(one.loss)]
    if not others or min(len(taken.losses), len(others[0].losses)) < 2:
        return dict(taken.settings), None
    noise = max(taken.spread, others[0].spread, tuning.tolerance)
    close = abs(others[0].loss - taken.loss) <= noise
    return dict(taken.settings), dict(others[0].settings) if close else None


def edges_of(evidence: Evidence) -> list[str]:
    """The settings whose chosen value is the least or the greatest of three or more that were tried: a better one may
    lie beyond."""
    found = []
    for name, value in (evidence.chosen or {}).items():
        tried = [one.settings[name] for part in evidence.rounds for one in part.tried]
        numbers = all(isinstance(entry, int | float) and not isinstance(entry, bool) for entry in tried)
        if numbers and len(set(tried)) > 2 and value in (min(tried), max(tried)):
            found.append(name)
    return found


def tuning_tables(tuning: Tuning | None, evidence: Mapping[Place, Evidence]) -> list[Table]:
    """One for each round."""
    if tuning is None:
        return []
    tables = []
    for index, (share, _) in enumerate(tuning.rounds):
        parts = {place: found.rounds[index].tried for place, found in evidence.items() if index < len(found.rounds)}
        losses = {place: list(tried) for place, tried in parts.items() if tried}
        if losses:
            tables.append(tuning_table(losses, share))
    if len(tables) == len(tuning.rounds):
        tables[-1] = replace(tables[-1], note=" ".join([tables[-1].note, *_remarks(tuning, evidence)]))
    return tables


def _remarks(tuning: Tuning, evidence: Mapping[Place, Evidence]) -> list[str]:
    """What the last round's table says besides: what is taken, what is left open, and what may lie beyond."""
    remarks = []
    if tuning.tolerance:
        remarks.append(f"Taken is the lowest {tuning.extended} among losses at most {tuning.tolerance:g} above it.")
    close = [str(place) for place, found in evidence.items() if found.second is not None]
    if close:
        remarks.append(f"Two choices differ by less than seeds do, and both are reported: {', '.join(close)}.")
    edges = [f"{place} ({', '.join(names)})" for place, found in evidence.items() if (names := edges_of(found))]
    if edges:
        beyond = "Chosen at the edge of what was tried, so that a better value may lie beyond"
        remarks.append(f"{beyond}: {'; '.join(edges)}.")
    return remarks


def tuning_table(losses: Losses, share: float = 1.0) -> Table:
    """The loss of every choice, the lowest marked."""
    choices = list(dict.fromkeys(one.label for tried in losses.values() for one in tried))
    several = len({place.column for place in losses}) > 1
    rows, marked = [], set()
    for y, (place, tried) in enumerate(losses.items()):
        found = {one.label: one.loss for one in tried}
        cells = [f"{found[choice]:.4f}" if choice in found else "" for choice in choices]
        rows.append([str(place) if several else place.row, *cells])
        marked.add((y, 1 + choices.index(min(found, key=found.__getitem__))))
    seeds = sorted({len(one.losses) for tried in losses.values() for one in tried})
    number = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    note = (
        f"Mean loss within the training length{f', over {number} seeds' if seeds[-1] > 1 else ''}; the lowest is bold."
    )
    title = "Tuning" if share == 1.0 else f"Tuning, {share:g} of the steps"
    return Table(["attention", *choices], rows, title, note, frozenset(marked))

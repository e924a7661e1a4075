"""The search of tuning: which runs to try next, given the losses of those before."""

import math
from collections.abc import Collection, Sequence
from functools import cached_property, partial

from tra.experiments.cells import Cell, Place
from tra.experiments.grid import Choices, Grid
from tra.experiments.tuning import Evidence, Losses, Round, Settings, Tuning, chosen_settings


class Search:
    """What tuning tries: told the losses of what it gave last, it gives the next runs, and none at the end."""

    def __init__(self, grid: Grid, elsewhere: Collection[Place] = ()) -> None:
        """Of columns and rows that are tuned elsewhere nothing is tried."""
        self.grid, self.left_out = grid, set(elsewhere)
        self.rounds: list[Losses] = []
        """Of each round so far, the losses."""
        self.choices: dict[str, Settings] = {}
        """Everything that was tried, by its label."""
        self.extending = False
        self.extensions: set[str] = set()
        """Runs past the ends of the grid that were given already: one that comes to nothing is not given again."""

    def next(self) -> list[Cell]:
        tuning = self.grid.tuning
        if tuning is None:
            return []
        if len(self.rounds) == 1:
            cells = [cell for cell in self._cells(tuning, 0, self._beyond) if cell.label not in self.extensions]
            self.extensions |= {cell.label for cell in cells}
            self.extending = bool(cells)
            if cells:
                return cells
        if len(self.rounds) == len(tuning.rounds):
            return []
        number = tuning.rounds[len(self.rounds)][1]
        return self._cells(tuning, len(self.rounds), (lambda place: self._best(place, number)) if self.rounds else None)

    def tell(self, losses: Losses) -> None:
        """Add what was found: a round of its own, or more of the first."""
        if self.extending:
            for place, found in losses.items():
                self.rounds[0].setdefault(place, {}).update(found)
        else:
            self.rounds.append(losses)

    def evidence(self) -> dict[Place, Evidence]:
        """What was found for each column and row that was tried; the last round decides."""
        tuning = self.grid.tuning
        if tuning is None or not self.rounds:
            return {}
        last = self.rounds[-1]
        return {
            place: Evidence(
                place.column,
                list(tuning.seeds),
                [
                    Round(share, losses.get(place, {}))
                    for (share, _), losses in zip(tuning.rounds, self.rounds, strict=False)
                ],
                chosen_settings(tuning, self.choices, last[place]) if place in last else None,
            )
            for place in dict.fromkeys(place for losses in self.rounds for place in losses)
        }

    @cached_property
    def expected(self) -> list[Cell]:
        """About what it comes to, before anything is known: of each later round the first choices."""
        tuning = self.grid.tuning
        if tuning is None:
            return []
        cells, left = [], tuning.choices()
        for index, (_, most) in enumerate(tuning.rounds):
            left = left[:most]
            cells += self._cells(tuning, index, partial(_always, left))
        return cells

    def _cells(self, tuning: Tuning, index: int, choices: Choices | None) -> list[Cell]:
        cells = self.grid.tuning_cells(tuning.rounds[index][0], choices)
        cells = [cell for cell in cells if cell.place not in self.left_out]
        self.choices |= {cell.choice_label: cell.choice for cell in cells}
        return cells

    def _best(self, place: Place, number: int | None) -> list[Settings]:
        """So many choices with the lowest losses of the last round."""
        losses = self.rounds[-1].get(place, {})
        finite = [label for label in losses if math.isfinite(losses[label])]
        return [self.choices[label] for label in sorted(finite, key=losses.__getitem__)[:number]]

    def _beyond(self, place: Place) -> list[Settings]:
        """The choice past the best one, if the grid has to be extended."""
        assert self.grid.tuning is not None
        losses, best = self.rounds[0].get(place, {}), self._best(place, 1)
        further = self.grid.tuning.beyond([self.choices[label] for label in losses], best[0]) if best else None
        return [further] if further is not None else []


def _always(choices: Sequence[Settings], place: Place) -> Sequence[Settings]:
    return choices

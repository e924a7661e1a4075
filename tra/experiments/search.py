"""The search of tuning: which runs to try next, given the losses of those before."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from tra.experiments.cells import Cell, Place
from tra.experiments.grid import Choices, Grid
from tra.experiments.rows import Settings
from tra.experiments.tuning import Evidence, Losses, Round, Tried, Tuning, evidence_of


class Search:
    """What tuning tries. `next` gives runs, and none at the end; `tell` takes their losses."""

    def __init__(self, grid: Grid, known: Mapping[Place, Evidence] | None = None) -> None:
        """Columns and rows that are known from joined results are not tried again, but for seeds that they lack."""
        self.grid, self.known = grid, known or {}
        self.rounds: list[Losses] = []
        """Of each round so far, the losses."""
        self.extending = False
        self.extensions: set[str] = set()
        """Runs past the ends of the grid that were given already. One without a result is not given again."""

    def next(self) -> list[Cell]:
        tuning = self.grid.tuning
        if tuning is None:
            return []
        if len(self.rounds) == 1:
            cells = [cell for cell in self._cells(0, self._beyond) if cell.label not in self.extensions]
            self.extensions |= {cell.label for cell in cells}
            self.extending = bool(cells)
            if cells:
                return cells
        index = len(self.rounds)
        if index == len(tuning.rounds):
            return []
        number = tuning.rounds[index][1]
        cells = self._cells(index, (lambda place: self._best(place, number)) if self.rounds else None)
        if index == len(tuning.rounds) - 1:
            cells += self._missing_seeds(tuning)
        elif not cells:  # everything is known but seeds of the last round
            self.rounds.append({})
            return self.next()
        return cells

    def tell(self, losses: Losses) -> None:
        """Add the losses of the runs given last: as a new round, or to the first where that was extended."""
        if self.extending:
            for place, found in losses.items():
                self.rounds[0].setdefault(place, []).extend(found)
        else:
            self.rounds.append(losses)

    def evidence(self) -> dict[Place, Evidence]:
        """What was found for each column and row that was tried; the last round decides."""
        tuning = self.grid.tuning
        if tuning is None or not self.rounds:
            return {}
        last = self.rounds[-1]
        places = dict.fromkeys(place for losses in self.rounds for place in losses)
        return {
            place: self._completed(tuning, self.known[place], last[place])
            if place in self.known
            else evidence_of(
                tuning,
                place.column,
                [
                    Round(share, losses.get(place, []))
                    for (share, _), losses in zip(tuning.rounds, self.rounds, strict=False)
                ],
                decided=place in last,
            )
            for place in places
        }

    @cached_property
    def expected(self) -> list[Cell]:
        """About what will be run, before any loss is known: in later rounds the first choices stand for the best."""
        tuning = self.grid.tuning
        if tuning is None:
            return []
        cells, most = [], math.inf
        for index, (_, number) in enumerate(tuning.rounds):
            most = most if number is None else min(most, number)
            left = None if most == math.inf else int(most)
            cells += self._cells(index, lambda place, left=left: self.grid.choices(place)[:left])  # type: ignore[misc]
        return cells + self._missing_seeds(tuning)

    def _cells(self, index: int, choices: Choices | None) -> list[Cell]:
        return [cell for cell in self.grid.tuning_cells(index, choices) if cell.place not in self.known]

    def _missing_seeds(self, tuning: Tuning) -> list[Cell]:
        """Runs of the last round with seeds that evidence from elsewhere lacks."""
        last = len(tuning.rounds) - 1
        cells = []
        for number in range(1, len(tuning.seeds)):

            def tried(place: Place, number: int = number) -> list[Settings]:
                found = self.known.get(place)
                lacking = found is not None and len(found.seeds) == number
                return [one.settings for one in found.rounds[last].tried] if found is not None and lacking else []

            cells += self.grid.tuning_cells(last, tried, tuning.seeds[number:])
        return cells

    def _completed(self, tuning: Tuning, known: Evidence, found: Sequence[Tried]) -> Evidence:
        """Evidence from elsewhere, with what seeds that it lacked have come to."""
        more = {one.label: one.losses for one in found}
        last = known.rounds[-1]
        tried = [Tried(one.settings, [*one.losses, *more.get(one.label, ())]) for one in last.tried]
        if any(len(one.losses) < len(tuning.seeds) for one in tried):  # some are not trained yet
            return known
        return evidence_of(tuning, known.column, [*known.rounds[:-1], Round(last.share_of_steps, tried)])

    def _best(self, place: Place, number: int | None) -> list[Settings]:
        """The choices with the lowest losses of the last round, this number of them."""
        finite = [one for one in self.rounds[-1].get(place, []) if math.isfinite(one.loss)]
        return [one.settings for one in sorted(finite, key=lambda one: one.loss)[:number]]

    def _beyond(self, place: Place) -> list[Settings]:
        """The choice past the best one, if the grid has to be extended."""
        assert self.grid.tuning is not None
        tried, best = self.rounds[0].get(place, []), self._best(place, 1)
        planned = len(self.grid.choices(place))
        further = self.grid.tuning.beyond([one.settings for one in tried], best[0], planned) if best else None
        return [further] if further is not None else []

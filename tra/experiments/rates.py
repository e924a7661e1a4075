"""The learning rate of each mechanism: the same grid for all, on the induction task of the table.

What it finds at the small scale stands in `tra.recipes.rates`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from tra.attention import MECHANISMS
from tra.experiments import table1
from tra.experiments.base import Experiment, Outcome
from tra.experiments.tuning import Losses, tuning_table
from tra.recipes import Recipe, RecipeOf
from tra.report.intervals import spread
from tra.report.records import grouped
from tra.report.tables import Table


def _grid(recipe_of: RecipeOf, rates: Sequence[float]) -> Mapping[str, RecipeOf]:
    def at(rate: float) -> RecipeOf:
        def recipe(attention: str = "tra") -> Recipe:
            return replace(recipe_of(attention=attention), learning_rate=rate)

        return recipe

    return {f"{rate:g}": at(rate) for rate in rates}


def losses_by_rate(outcome: Outcome) -> Losses:
    """Mean loss over seeds at the training length."""
    found: Losses = {}
    within = [record for record in outcome.records if record.result.length == record.trained]
    for (row, rate), some in grouped(within, lambda record: (record.row, record.column)).items():
        found.setdefault(("", row), {})[rate] = spread([record.result.loss for record in some])[0]
    return found


def _tables(outcome: Outcome) -> list[Table]:
    return [tuning_table(losses_by_rate(outcome))]


def _no_figures(outcome: Outcome) -> dict[str, Figure]:
    return {}


RATES = Experiment(
    scales={
        "smoke": _grid(table1.SMOKE["induct_once"], (1e-3, 2e-3)),
        "small": _grid(table1.SMALL_SCALE["induct_once"], (1e-3, 2e-3, 4e-3)),
        "paper": _grid(table1.PAPER["induct_once"], (3e-5, 1e-4, 3e-4, 1e-3)),
    },
    rows=tuple(MECHANISMS),
    tables=_tables,
    figures=_no_figures,
)

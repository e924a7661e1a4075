"""The learning rate of each mechanism: the same grid for all, on the induction task of the table."""

from dataclasses import replace

from tra.recipes import table1
from tra.recipes.base import Recipe

LEARNING_RATES = (1e-3, 2e-3, 4e-3)


def paper() -> dict[str, Recipe]:
    """At the table's paper scale, a tenth to ten times its learning rate."""
    return _grid(table1.paper()["induct_once"], (3e-5, 1e-4, 3e-4, 1e-3))


def small() -> dict[str, Recipe]:
    """At the table's small scale."""
    return _grid(table1.small()["induct_once"], LEARNING_RATES)


def smoke() -> dict[str, Recipe]:
    """Seconds."""
    return _grid(table1.smoke()["induct_once"], (1e-3, 2e-3))


def _grid(recipe: Recipe, rates: tuple[float, ...]) -> dict[str, Recipe]:
    return {f"{rate:g}": replace(recipe, learning_rate=rate) for rate in rates}

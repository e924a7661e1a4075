"""Recipes: functions that return a complete description of a run. The command line only overrides."""

from collections.abc import Callable

from tra.recipes.base import Evaluation, Recipe
from tra.recipes.flip_flop import flip_flop, flip_flop_small

RECIPES: dict[str, Callable[[], Recipe]] = {
    "flip-flop": flip_flop,
    "flip-flop-small": flip_flop_small,
}

__all__ = ["RECIPES", "Evaluation", "Recipe"]

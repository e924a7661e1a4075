"""Recipes: functions that return a complete description of a run. The command line only overrides.

A file per table or figure has a function for each scale, which returns a recipe per column.
"""

from collections.abc import Callable
from functools import partial

from tra.recipes import figure2, table1
from tra.recipes.base import Evaluation, Recipe, TextData
from tra.recipes.flip_flop import flip_flop, flip_flop_small

RECIPES: dict[str, Callable[[], Recipe]] = {
    "flip-flop": flip_flop,
    "flip-flop-small": flip_flop_small,
    "wikitext103": lambda: figure2.paper()["wikitext103"],
    "wikitext103-small": lambda: figure2.small()["wikitext103"],
}
for _task in table1.STRINGS:
    _name = _task.replace("_", "-")
    RECIPES[_name] = partial(lambda task: table1.paper()[task], _task)
    RECIPES[f"{_name}-small"] = partial(lambda task: table1.small()[task], _task)

__all__ = ["RECIPES", "Evaluation", "Recipe", "TextData"]

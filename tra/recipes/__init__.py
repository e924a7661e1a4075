"""Recipes: functions of a mechanism's name that return a complete run. The command line only overrides."""

from collections.abc import Callable

from tra import plugins
from tra.recipes.base import Recipe
from tra.recipes.flip_flop import flip_flop, flip_flop_small
from tra.recipes.strings import STRING_RECIPES
from tra.recipes.wikitext import wikitext103, wikitext103_small
from tra.tasks import Evaluation

RecipeOf = Callable[..., Recipe]
"""Takes the name of a mechanism, ``attention``, which has a default."""

RECIPES: dict[str, RecipeOf] = {
    "flip-flop": flip_flop,
    "flip-flop-small": flip_flop_small,
    **STRING_RECIPES,
    "wikitext103": wikitext103,
    "wikitext103-small": wikitext103_small,
}
"""Every recipe of this package by name; plug-ins add others."""


def build_recipe(name: str, attention: str | None = None) -> Recipe:
    """The recipe of a name, for a mechanism or for the one it has by default.

    Example:
        >>> build_recipe("copy-unique-small", "rope").learning_rate
        0.001
    """
    make = plugins.find("RECIPES", RECIPES, name, "recipe")
    return make() if attention is None else make(attention=attention)


__all__ = ["RECIPES", "Evaluation", "Recipe", "RecipeOf", "build_recipe"]

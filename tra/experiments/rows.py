"""Rows: what an experiment compares."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tra.recipes import Recipe, RecipeOf
from tra.signatures import format_value

Settings = Mapping[str, Any]
"""Values of fields of a recipe, by name; those of the model have names such as ``model.width``."""
OPTION = "model.attention_options."
"""Begins the name of a field that is an option of the mechanism."""


@dataclass(frozen=True)
class Row:
    """What is compared: a mechanism, its options, and other changes to the recipes.

    Example:
        >>> Row("rope", {"theta": 10_000}).label
        'rope theta=10000'
        >>> Row("rope", changes={"model.layers": 2}).label
        'rope model.layers=2'
    """

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    changes: Settings = field(default_factory=dict, hash=False)
    """What else the recipe is to have."""
    name: str = ""
    """What the row is called; the mechanism with its options and changes by default."""
    tuned: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)
    """Values of fields of the recipe that are tuned for this row, besides those that are tuned for all."""

    def __post_init__(self) -> None:
        if "seed" in self.changes:
            raise ValueError("changes must leave the seed alone: an experiment gives each run its own")

    @property
    def label(self) -> str:
        return self.name or " ".join([self.attention, *settings_words({**self.options, **self.changes})])

    def recipe(self, recipe_of: RecipeOf, seed: int) -> Recipe:
        """A column's recipe as this row has it."""
        recipe = recipe_of(attention=self.attention)
        options = {**recipe.model.attention_options, **self.options}
        return recipe.changed({"model.attention_options": options, **self.changes, "seed": seed})


def sweep(rows: Iterable[Row | str], fields: Mapping[str, Sequence[Any]]) -> tuple[Row, ...]:
    """Every row with every combination of values of fields of the recipe.

    Example:
        >>> [row.label for row in sweep(["tra"], {"model.layers": (2, 4)})]
        ['tra model.layers=2', 'tra model.layers=4']
    """
    return tuple(
        replace(row, changes={**row.changes, **dict(zip(fields, values, strict=True))})
        for row in map(as_row, rows)
        for values in itertools.product(*fields.values())
    )


def as_row(row: Row | str) -> Row:
    return Row(row) if isinstance(row, str) else row


def settings_words(values: Settings) -> list[str]:
    """Options by their own names, other fields by those that `Recipe.changed` knows."""
    return [f"{name.removeprefix(OPTION)}={format_value(value)}" for name, value in values.items()]


def choice_label(choice: Settings) -> str:
    """Settings that tuning tries, as tables and folders name them."""
    return " ".join(settings_words(choice))

"""Smaller versions of a recipe, to see in seconds that everything works; nothing is learned."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tra.attention.naming import mechanism_names
from tra.model import DecoderConfig
from tra.recipes import Evaluation, Recipe, RecipeOf


def shrunk(recipe_of: RecipeOf) -> Callable[..., Recipe]:
    """Of a synthetic task: one narrow layer of each mechanism, four steps, four sequences of the shorter sets."""

    def smoke(attention: str = "tra") -> Recipe:
        recipe = recipe_of(attention=attention)
        model = replace(recipe.model, layers=len(mechanism_names(attention)), heads=2, width=16)
        evaluations = tuple(replace(entry, examples=4) for entry in recipe.evaluations if entry.length <= 64)
        return _short(recipe, model=model, length=8, evaluations=evaluations)

    return smoke


def shrunk_text(recipe_of: RecipeOf) -> Callable[..., Recipe]:
    """Of a text: two narrow layers, a tiny vocabulary, four steps."""

    def smoke(attention: str = "tra") -> Recipe:
        recipe = recipe_of(attention=attention)
        return _short(
            recipe,
            model=DecoderConfig(vocabulary=300, layers=2, heads=2, width=16, attention=attention),
            task_options={**recipe.task_options, "tokenizer": "bpe-300"},
            length=16,
            evaluations=(Evaluation("valid", 16, 8), Evaluation("valid", 32, 4), Evaluation("valid", 32, 4, stride=8)),
        )

    return smoke


def _short(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with these changes, for a few steps."""
    name = f"{recipe.name}-smoke"
    return replace(recipe, name=name, steps=4, batch=4, checkpoint_every=2, log_every=1, **changes)

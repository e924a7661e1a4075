"""The learning rate of each step."""

import math

from tra.recipes import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of a step, the first being 0."""
    return recipe.learning_rate * schedule_factor(recipe, step)


def schedule_factor(recipe: Recipe, step: int) -> float:
    """Factor on the recipe's learning rate: linear warm-up, then as its schedule says."""
    rising, steps = recipe.warmup_length, recipe.steps
    if step < rising:
        return (step + 1) / (rising + 1)
    if recipe.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))
    falling = steps - recipe.stable_steps
    return 1.0 if step < recipe.stable_steps else (steps - step) / (falling + 1)

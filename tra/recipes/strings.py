"""Copying, induction and instructed strings: at the paper's scale, and at one for two cores."""

from collections.abc import Callable
from functools import partial

from tra.model import DecoderConfig, sized
from tra.recipes.base import Recipe
from tra.recipes.rates import small_rate
from tra.tasks import Evaluation

SETS = {
    "copy_unique": ("copy",),
    "copy_repeat": ("copy",),
    "induct_once": ("induct",),
    "induct_recent": ("induct",),
    "instructed": ("all", "copy", "reverse", "last", "next", "previous", "drop"),
}
"""The evaluation sets of each task on strings."""

LONGER = dict.fromkeys(SETS, (50, 100, 150, 200, 250, 300)) | {"instructed": (50, 100, 200, 300, 400, 500)}


def paper(task: str, attention: str = "tra") -> Recipe:
    """Mini model; strings of up to 50 symbols, 4M of them in one pass. Learning rate and alphabet are ours."""
    return Recipe(
        name=task.replace("_", "-"),
        model=sized("mini", vocabulary=600, attention=attention),
        task=task,
        task_options={"alphabet": 512},
        length=50,
        steps=31_250,
        batch=128,
        learning_rate=1e-4,
        log_every=100,
        checkpoint_every=1000,
        evaluations=tuple(Evaluation(name, length, 1000) for length in LONGER[task] for name in SETS[task]),
    )


def small(task: str, attention: str = "tra") -> Recipe:
    """Two cores: a narrower model, strings of up to 8 symbols measured at up to 4 times that."""
    sets = SETS[task]
    return Recipe(
        name=f"{task.replace('_', '-')}-small",
        model=DecoderConfig(vocabulary=50, layers=4, heads=4, width=128, dropout=0.0, attention=attention),
        task=task,
        task_options={"alphabet": 40},
        length=8,
        steps=1000,
        batch=32,
        learning_rate=small_rate(attention),
        beta2=0.95,
        checkpoint_every=500,
        keep_checkpoints=1,
        evaluations=tuple(
            Evaluation(name, length, 256 if len(sets) == 1 else 128) for length in (8, 16, 32) for name in sets
        ),
    )


STRING_RECIPES: dict[str, Callable[..., Recipe]] = {
    name: partial(scale, task)
    for task in SETS
    for name, scale in ((task.replace("_", "-"), paper), (f"{task.replace('_', '-')}-small", small))
}

"""Copying, induction and instructed strings, at the paper's scale and at one for two cores; parity and recall at the
latter."""

from collections.abc import Callable
from functools import partial

from tra.model import sized
from tra.recipes.base import Recipe
from tra.tasks import Evaluation, build_task

SETS = {
    "copy_unique": ("copy",),
    "copy_repeat": ("copy",),
    "induct_once": ("induct",),
    "induct_recent": ("induct",),
    "instructed": ("all", "copy", "reverse", "last", "next", "previous", "drop"),
}
"""The evaluation sets of each of the paper's tasks on strings."""

OTHERS = {"recall": ("recall",), "parity": ("parity",)}
"""Those of tasks that the paper does not have."""

LONGER = dict.fromkeys(SETS, (50, 100, 150, 200, 250, 300)) | {"instructed": (50, 100, 200, 300, 400, 500)}


def paper(task: str, attention: str = "tra") -> Recipe:
    """Mini model; strings of up to 50 symbols, the stated 100,000 steps. Learning rate and alphabet are ours."""
    return Recipe(
        name=task.replace("_", "-"),
        model=sized("mini", vocabulary=600, attention=attention),
        task=task,
        task_options={"alphabet": 512},
        length=50,
        steps=100_000,
        batch=128,
        learning_rate=1e-4,
        log_every=100,
        checkpoint_every=1000,
        evaluations=tuple(Evaluation(name, length, 1000) for length in LONGER[task] for name in SETS[task]),
    )


def small(task: str, attention: str = "tra") -> Recipe:
    """Two cores: the mini model without dropout in bfloat16, strings of up to 8 symbols (24 tokens of recall),
    measured at up to 8 times that. Copying has a smaller alphabet, with which it takes fewer steps, and is measured
    at up to 4 times."""
    sets, length = {**SETS, **OTHERS}[task], 24 if task == "recall" else 8
    copies = task.startswith("copy")
    alphabet, steps, times = (40, 1500, (1, 2, 3, 4)) if copies else (100, 2500, (1, 2, 4, 8))
    options = {"alphabet": alphabet} if task in SETS else {}
    vocabulary = build_task(task, options).vocabulary
    return Recipe(
        name=f"{task.replace('_', '-')}-small",
        model=sized("mini", vocabulary=vocabulary, dropout=0.0, attention=attention),
        task=task,
        task_options=options,
        length=length,
        steps=steps,
        batch=32,
        learning_rate=1e-3,
        beta2=0.95,
        precision="bf16",
        checkpoint_every=500,
        keep_checkpoints=1,
        evaluations=tuple(
            Evaluation(name, factor * length, 256 if len(sets) == 1 else 128) for factor in times for name in sets
        ),
    )


STRING_RECIPES: dict[str, Callable[..., Recipe]] = {
    name: partial(scale, task)
    for scale, tasks, suffix in ((paper, SETS, ""), (small, {**SETS, **OTHERS}, "-small"))
    for task in tasks
    for name in (task.replace("_", "-") + suffix,)
}

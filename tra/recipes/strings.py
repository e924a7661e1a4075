"""Copying, induction and instructed strings, at the paper's scale and at one for two cores. Tasks that are not in the
paper: at the latter only."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tra.model import DecoderConfig, sized
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

OTHERS = {
    "recall": ("recall",),
    "parity": ("parity",),
    "mqmtar": ("mqmtar",),
    "sort": ("sort",),
    "reverse": ("reverse",),
    "majority": ("majority",),
    "word_problem": ("product",),
    "n_back": ("n_back",),
}
"""The evaluation sets of tasks that are not in the paper."""

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


class _Size(NamedTuple):
    """Sizes of a task at the small scale."""

    options: Mapping[str, int]
    """Options of the task."""
    length: int = 8
    steps: int = 2500
    times: Sequence[int] = (1, 2, 4, 8)
    """Evaluation lengths, as multiples of the training length."""
    layers: int = 4
    width: int = 256


_COPY = _Size({"alphabet": 40}, steps=1500, times=(1, 2, 3, 4))
SMALL = {
    "copy_unique": _COPY,
    "copy_repeat": _COPY,
    "induct_once": _Size({"alphabet": 100}),
    "induct_recent": _Size({"alphabet": 40}, steps=1500, layers=2, width=128),
    "instructed": _Size({"alphabet": 20}),
    "recall": _Size({"keys": 64}, length=12, steps=2000, layers=2, width=128),
    "parity": _Size({}, steps=1500, layers=2, width=128),
    "mqmtar": _Size({"alphabet": 8}, length=16, steps=2000, layers=2, width=128),
    "sort": _Size({"alphabet": 32}),
    "reverse": _Size({"alphabet": 32}, times=(1, 2, 3, 4)),
    "majority": _Size({}, steps=1500, layers=2, width=128),
    "word_problem": _Size({"alphabet": 2}),
    "n_back": _Size({"alphabet": 32}, steps=1500, layers=2, width=128),
}
"""Sizes at which several mechanisms learn the task within its length, in trials on a seed that is not reported. Those
with two layers use the small model of flip-flop, which leaves time for more mechanisms. The sizes of mqmtar, sort,
reverse, majority, word_problem and n_back are first choices, hardly tried."""


def small(task: str, attention: str = "tra") -> Recipe:
    """Two cores: the mini model, or that of flip-flop, without dropout in bfloat16, on strings of up to 8 symbols
    (12 tokens of recall, 16 of mqmtar), measured at up to 8 times that (copying and reversing: 4 times)."""
    size, sets = SMALL[task], {**SETS, **OTHERS}[task]
    return Recipe(
        name=f"{task.replace('_', '-')}-small",
        model=DecoderConfig(
            vocabulary=build_task(task, size.options).vocabulary,
            layers=size.layers,
            heads=4,
            width=size.width,
            dropout=0.0,
            attention=attention,
        ),
        task=task,
        task_options=dict(size.options),
        length=size.length,
        steps=size.steps,
        batch=32,
        learning_rate=1e-3,
        beta2=0.95,
        precision="bf16",
        checkpoint_every=500,
        keep_checkpoints=1,
        evaluations=tuple(
            Evaluation(name, factor * size.length, 256 if len(sets) == 1 else 128)
            for factor in size.times
            for name in sets
        ),
    )


STRING_RECIPES: dict[str, Callable[..., Recipe]] = {
    name: partial(scale, task)
    for scale, tasks, suffix in ((paper, SETS, ""), (small, {**SETS, **OTHERS}, "-small"))
    for task in tasks
    for name in (task.replace("_", "-") + suffix,)
}

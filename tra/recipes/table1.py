"""The paper's table: exact match on every synthetic task, for every mechanism."""

from dataclasses import replace

from tra.model import DecoderConfig, sized
from tra.recipes.base import Evaluation, Recipe
from tra.recipes.flip_flop import flip_flop, flip_flop_small

STRINGS = {
    "copy_unique": ("copy",),
    "copy_repeat": ("copy",),
    "induct_once": ("induct",),
    "induct_recent": ("induct",),
    "instructed": ("all", "copy", "reverse", "last", "next", "previous", "drop"),
}
"""The evaluation sets of each task on strings."""

LEARNING_RATES = {
    "tra": 2e-3,
    "rope": 1e-3,
    "nope": 1e-3,
    "sinusoidal": 1e-3,
    "alibi": 1e-3,
    "t5": 2e-3,
    "fot": 1e-3,
    "cope": 1e-3,
    "stick-breaking": 2e-3,
    "differential": 4e-3,
    "selective": 1e-3,
    "tra-threshold-only": 1e-3,
    "tra-distance-only": 1e-3,
    "tra-ordinary-distance": 1e-3,
}
"""At the small scale: for each mechanism the best of the grid that `tra reproduce tuning` measures."""


def paper() -> dict[str, Recipe]:
    """Mini models; strings of up to 50 symbols, 4M of them in one pass. Learning rates and alphabets are ours."""
    longer = dict.fromkeys(STRINGS, (50, 100, 150, 200, 250, 300)) | {"instructed": (50, 100, 200, 300, 400, 500)}
    return {"flip_flop": flip_flop()} | {
        task: Recipe(
            name=task,
            model=sized("mini", vocabulary=600),
            task=task,
            length=50,
            alphabet=512,
            steps=31_250,
            batch=128,
            learning_rate=1e-4,
            log_every=100,
            checkpoint_every=1000,
            evaluations=_evaluations(sets, longer[task], examples=1000),
        )
        for task, sets in STRINGS.items()
    }


def small() -> dict[str, Recipe]:
    """Two cores: narrower models, strings of up to 8 symbols read at up to 4 times that."""
    flips = flip_flop_small()
    return {
        "flip_flop": replace(
            flips,
            name="flip_flop",
            model=replace(flips.model, width=64),
            steps=500,
            learning_rate=2e-3,
            evaluations=_evaluations(("iid", "sparse", "dense"), (64, 256, 1024), examples=128),
        )
    } | {
        task: Recipe(
            name=task,
            model=DecoderConfig(vocabulary=50, layers=4, heads=4, width=128, dropout=0.0),
            task=task,
            length=8,
            alphabet=40,
            steps=1000,
            batch=32,
            learning_rate=2e-3,
            beta2=0.95,
            checkpoint_every=500,
            keep_checkpoints=1,
            evaluations=_evaluations(sets, (8, 16, 32), examples=256 if len(sets) == 1 else 128),
        )
        for task, sets in STRINGS.items()
    }


def smoke() -> dict[str, Recipe]:
    """Seconds, to see that everything works; nothing is learned."""
    return {
        task: replace(
            recipe,
            model=replace(recipe.model, layers=1, heads=2, width=16),
            length=8,
            steps=4,
            batch=4,
            checkpoint_every=2,
            log_every=1,
            evaluations=tuple(replace(entry, examples=4) for entry in recipe.evaluations if entry.length <= 64),
        )
        for task, recipe in small().items()
    }


def _evaluations(sets: tuple[str, ...], lengths: tuple[int, ...], examples: int) -> tuple[Evaluation, ...]:
    return tuple(Evaluation(name, length, examples) for length in lengths for name in sets)

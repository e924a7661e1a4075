"""What validation during training says: which step is best, and when to stop. Both follow from the metrics alone, so a
run that goes on after a kill decides as one that never stopped."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tra.tasks import Result

BEFORE = "validation/"
"""Begins the names of what validation measures."""


def as_metrics(results: Sequence[Result], before: str = BEFORE) -> dict[str, float]:
    """Every measure of every set, and its mean over the sets, by the names that logs and trackers use."""
    single = {
        f"{before}{result.set_label}@{result.length}/{name}": value
        for result in results
        for name, value in result.measures().items()
    }
    names = results[0].measure_names() if results else ()
    means = {f"{before}{name}": sum(result.measures()[name] for result in results) / len(results) for name in names}
    return {**means, **single}


class Watched(NamedTuple):
    """What the values of a measure say."""

    best: int | None
    """The step of the best one, the first of several."""
    stopped: int | None
    """The step at which patience ended."""


def watch(values: Iterable[tuple[int, float]], higher_is_better: bool, patience: int | None = None) -> Watched:
    """Follow a measure from step to step.

    Example:
        >>> watch([(10, 0.5), (20, 0.3), (30, 0.4), (40, 0.3)], higher_is_better=False, patience=2)
        Watched(best=20, stopped=40)
    """
    best, at, since = math.nan, None, 0
    for step, value in values:
        value = value if higher_is_better else -value
        if value > best or (math.isnan(best) and not math.isnan(value)):
            best, at, since = value, step, 0
        else:
            since += 1
        if patience is not None and since >= patience:
            return Watched(at, step)
    return Watched(at, None)

"""Times of two pieces of work that are compared: run in turn, because machines are noisy."""

import statistics
import time
from collections.abc import Callable

Work = Callable[[], object]

FEWEST, MOST = 3, 200
"""Times that each side runs."""


def interleaved(ours: Work, theirs: Work, seconds: float) -> tuple[float, float]:
    """Median seconds of both, run in turn for about the given time, at least three times each.

    Example:
        >>> slow, fast = interleaved(lambda: sum(range(100_000)), lambda: None, seconds=0.01)
        >>> slow > fast
        True
    """
    ours()
    theirs()
    times: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    while len(times[0]) < FEWEST or (time.perf_counter() - began < seconds and len(times[0]) < MOST):
        for work, taken in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    first, second = (statistics.median_high(taken) for taken in times)
    return first, second

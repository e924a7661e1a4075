"""Which of the tiles that compile without spills is the fastest here: timed once for each kind of call.

What is computed does not depend on it: `tiles` offers only what gives the same bits.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import torch
import triton.testing
from triton.errors import TritonError

Choice = TypeVar("Choice")
Result = TypeVar("Result")


def clock(attempt: Callable[[], object]) -> float:
    return triton.testing.do_bench(attempt, warmup=10, rep=50, return_mode="median")


def may_wait() -> bool:
    """Timing waits for the device, which a graph that is being captured forbids."""
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


fastest: dict[Hashable, object] = {}


def run_fastest(kind: Hashable, choices: Sequence[Choice], attempt: Callable[[Choice], Result]) -> Result:
    """What the attempt gives with the fastest choice for this kind of call, or with the first that the device takes
    where that cannot be found out now."""
    if kind not in fastest and len(choices) > 1 and may_wait():
        times = {choice: _time(partial(attempt, choice)) for choice in choices}
        fastest[kind] = min(times, key=times.__getitem__)
    if kind in fastest:
        choices = [fastest[kind]]  # type: ignore[list-item]
    for choice in choices[:-1]:
        try:
            return attempt(choice)
        except TritonError:
            continue
    return attempt(choices[-1])


def _time(attempt: Callable[[], object]) -> float:
    """Infinite for what the device refuses: too much shared memory, too many registers."""
    try:
        return clock(attempt)
    except TritonError:
        return math.inf

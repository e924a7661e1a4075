"""Which of the tiles that compile without spills is the fastest here: timed once for each kind of call.

What is computed does not depend on it: `tiles` offers only what gives the same bits.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import torch
import triton.testing

Choice = TypeVar("Choice")


def clock(attempt: Callable[[], object]) -> float:
    return triton.testing.do_bench(attempt, warmup=10, rep=50, return_mode="median")


def may_wait() -> bool:
    """Timing waits for the device, which a graph that is being captured forbids."""
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


fastest: dict[Hashable, object] = {}


def choose(kind: Hashable, choices: Sequence[Choice], attempt: Callable[[Choice], object]) -> Choice:
    """The fastest choice for a kind of call, the first where it cannot be found out now."""
    if kind not in fastest:
        if len(choices) == 1 or not may_wait():
            return choices[0]
        fastest[kind] = min(choices, key=lambda choice: clock(partial(attempt, choice)))
    return fastest[kind]  # type: ignore[return-value]

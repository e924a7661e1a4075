"""How sure a figure is: 95% intervals by a bootstrap over test sequences and seeds.

All seeds are measured on the same sequences, so a replicate draws sequences once for all seeds, and seeds once for all
places; the sequences of different places are different ones. With few seeds such intervals are too narrow rather than
too wide; with one seed they say nothing of training. Where every sequence came out alike, all right or all wrong, there
is nothing to draw from: there the exact binomial bound is taken.
"""

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tra.tasks import Result

REPLICATES = 1000
LEVEL = 0.95
MOST_PARTS = 1024
"""More sequences are taken together in so many equal parts."""


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 where there is one value only, not a number where one is infinite)."""
    if not all(map(math.isfinite, values)):
        return sum(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def interval(places: Sequence[Sequence[Result]], field: str) -> tuple[float, float] | None:
    """Where the mean over places and seeds of a field lies, or None where earlier versions stored too little.

    Args:
        places: for each place (a length, say) the results of all seeds, in the same order of seeds.
        field: one of the measure's `titles`.
    """
    seeds = len(places[0])
    if any(len(place) != seeds for place in places):
        return None
    chosen = torch.randint(seeds, (REPLICATES, seeds), generator=torch.Generator().manual_seed(1))
    total = torch.zeros(REPLICATES, dtype=torch.float64)
    alike: dict[float, list[int]] = {0.0: [], 1.0: []}  # sequences of the places that are all wrong, or all right
    for index, place in enumerate(places):
        parts = [part for result in place if (part := result.split()) is not None and len(part)]
        if len(parts) < seeds:
            return None
        replicates = [_values(part, index, result, field) for part, result in zip(parts, place, strict=True)]
        scores = torch.stack(replicates, dim=1)
        total += scores.gather(1, chosen).mean(dim=1)
        first = float(scores[0, 0])
        if place[0].averages and first in alike and bool((scores == first).all()):
            alike[first].append(len(parts[0]))
    if not bool(total.isfinite().all()):
        return None
    total /= len(places)
    outside = (1 - LEVEL) / 2
    low, high = total.quantile(torch.tensor([outside, 1 - outside], dtype=torch.float64)).tolist()
    if low == high and not places[0][0].averages:
        return None  # of one stretch of text, and nothing to compare it with
    low -= len(alike[1.0]) / len(places) * unseen(sum(alike[1.0]), outside)
    high += len(alike[0.0]) / len(places) * unseen(sum(alike[0.0]), outside)
    return low, high


def unseen(number: int, outside: float = 1 - LEVEL) -> float:
    """How often something may happen that did not in so many trials (Clopper and Pearson); about 3 / number."""
    return 1 - outside ** (1 / number) if number else 0.0


def _values(part: Tensor, place: int, result: Result, field: str) -> Tensor:
    """The field in each replicate of the test sequences."""
    if len(part) > MOST_PARTS:
        part = torch.stack([some.sum(dim=0) for some in part.double().tensor_split(MOST_PARTS)])
    summed = _counts(len(part), place).double() @ part.double()
    return result.finish(summed[:, 0] / summed[:, 1], field)


@lru_cache(maxsize=16)
def _counts(number: int, place: int) -> Tensor:
    """How often each of a number of parts comes in each replicate ``[R, number]``, for one place of several."""
    generator = torch.Generator().manual_seed(number * 1009 + place)
    drawn = torch.randint(number, (REPLICATES, number), generator=generator)
    return torch.zeros(REPLICATES, number).scatter_add_(1, drawn, torch.ones(REPLICATES, number))

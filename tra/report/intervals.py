"""How sure a figure is: 95% intervals by a bootstrap over test sequences and seeds.

All seeds are measured on the same sequences, so a replicate draws sequences once for all seeds, and seeds once for all
lengths. With few seeds such intervals are too narrow rather than too wide; with one seed they say nothing of training.
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
    number, alike = 0, True
    for place in places:
        parts = [part for result in place if (part := result.split()) is not None and len(part)]
        if len(parts) < seeds:
            return None
        scores = torch.stack([_values(part, result, field) for part, result in zip(parts, place, strict=True)], dim=1)
        total += scores.gather(1, chosen).mean(dim=1)
        number += len(parts[0])
        alike = alike and all(bool((part == part[0]).all()) for part in parts)
    total /= len(places)
    outside = (1 - LEVEL) / 2
    low, high = total.quantile(torch.tensor([outside, 1 - outside], dtype=torch.float64)).tolist()
    if alike and places[0][0].averages and low == high and low in (0.0, 1.0):
        # All right or all wrong: what the exact binomial interval of so many sequences says.
        unseen = outside ** (1 / number)
        return (unseen, 1.0) if low == 1.0 else (0.0, 1 - unseen)
    return low, high


def _values(part: Tensor, result: Result, field: str) -> Tensor:
    """The field in each replicate of the test sequences."""
    if len(part) > MOST_PARTS:
        part = torch.stack([some.sum(dim=0) for some in part.double().tensor_split(MOST_PARTS)])
    summed = _counts(len(part)) @ part.double()
    return result.finish(summed[:, 0] / summed[:, 1], field)


@lru_cache(maxsize=64)
def _counts(number: int) -> Tensor:
    """How often each of a number of parts comes in each replicate ``[R, number]``."""
    drawn = torch.randint(number, (REPLICATES, number), generator=torch.Generator().manual_seed(number))
    return torch.zeros(REPLICATES, number, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(REPLICATES, number, dtype=torch.float64)
    )

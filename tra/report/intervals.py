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
    found = _replicates(places, field)
    if found is None:
        return None
    total, alike = found
    low, high = _quantiles(total)
    if low == high and not places[0][0].averages:
        return None  # of one stretch of text, and nothing to compare it with
    outside = (1 - LEVEL) / 2
    low -= len(alike[1.0]) / len(places) * unseen(sum(alike[1.0]), outside)
    high += len(alike[0.0]) / len(places) * unseen(sum(alike[0.0]), outside)
    return low, high


def difference(ours: Sequence[Result], theirs: Sequence[Result], field: str) -> tuple[float, float] | None:
    """Where the difference of two mechanisms on the same sequences lies: theirs less ours.

    Each replicate reads both on the same sequences, so that what makes a sequence hard for both cancels out.
    """
    both = [_replicates([results], field) for results in (ours, theirs)]
    parts = {len(part) if (part := result.split()) is not None else None for result in (*ours, *theirs)}
    if None in both or len(parts) > 1 or len(ours) != len(theirs):
        return None
    (mine, _), (other, _) = both  # type: ignore[misc]
    return _quantiles(other - mine)


def _quantiles(replicates: Tensor) -> tuple[float, float]:
    outside = (1 - LEVEL) / 2
    low, high = replicates.quantile(torch.tensor([outside, 1 - outside], dtype=torch.float64)).tolist()
    return low, high


def _replicates(places: Sequence[Sequence[Result]], field: str) -> tuple[Tensor, dict[float, list[int]]] | None:
    """The mean over places and seeds in each replicate, and of the places that are all wrong (0) or all right (1) how
    many sequences they have."""
    seeds = len(places[0])
    if any(len(place) != seeds for place in places):
        return None
    chosen = _seeds(seeds)
    total = torch.zeros(REPLICATES, dtype=torch.float64)
    alike: dict[float, list[int]] = {0.0: [], 1.0: []}
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
    return (total / len(places), alike) if bool(total.isfinite().all()) else None


def _seeds(number: int) -> Tensor:
    """Which seeds each replicate takes ``[R, number]``.

    Of few seeds every choice comes equally often. All three at the worst of three seeds is 1 choice in 27, hardly more
    than the 2.5% outside of a bound: drawn at random it may come too seldom, and the bound would miss that seed.
    """
    choices = number**number
    if choices > REPLICATES:
        return torch.randint(number, (REPLICATES, number), generator=torch.Generator().manual_seed(1))
    return torch.arange(REPLICATES)[:, None] % choices // number ** torch.arange(number) % number


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

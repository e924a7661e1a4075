"""The word problem of a group: what is the product of these permutations?

    <bos> 21345 23451 23451 <sep> -> 43512

Only the answer counts. ``21345`` is the permutation that takes 1 to 2 and 2 to 1 and leaves the others; the first one
is applied first. State tracking needs this. For S5 and A5 it is complete for NC1, so that no transformer of
fixed depth is expected to solve it at every length (Merrill et al. 2024, arXiv 2404.08819). As there, strings are made
of all elements of the group; with an alphabet of 2 they are made of two that generate it (Liu et al. 2023, arXiv
2210.10749), which is easier to learn. That only the product of the whole string is asked for is ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

from tra.lookup import lookup
from tra.tasks.base import Batch
from tra.tasks.strings import BOS, EOS, SEP, SPECIAL, StringTask, every, join

Group = Literal["S3", "S4", "A5", "S5"]
Permutation = tuple[int, ...]
GENERATORS: dict[str, tuple[Permutation, Permutation]] = {
    "S3": ((1, 0, 2), (1, 2, 0)),
    "S4": ((1, 0, 2, 3), (1, 2, 3, 0)),
    "A5": ((1, 2, 0, 3, 4), (1, 2, 3, 4, 0)),
    "S5": ((1, 0, 2, 3, 4), (1, 2, 3, 4, 0)),
}
"""A swap of two, or in A5 a cycle of three, and the cycle of all. Place i holds what i is taken to, from 0."""


@dataclass(frozen=True)
class WordProblem(StringTask):
    """The product of a string of permutations."""

    name = "word_problem"
    version = 1

    alphabet: int = 120
    """Number of elements that strings are made of, the two generators first."""
    group: Group = "S5"

    def __post_init__(self) -> None:
        lookup(GENERATORS, self.group, "group")
        if not 2 <= self.alphabet <= len(elements(self.group)):
            raise ValueError(
                f"alphabet must be between 2 and the {len(elements(self.group))} elements of {self.group}, "
                f"got {self.alphabet}"
            )

    @property
    def symbols(self) -> Sequence[str]:
        return (*SPECIAL, *("".join(str(place + 1) for place in element) for element in elements(self.group)))

    def evaluation_sets(self) -> Mapping[str, "WordProblem"]:
        return {"product": replace(self, mixed=False)}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        lengths = self.sample_lengths(rng, batch, length)
        present = torch.arange(length) < lengths[:, None]
        x = torch.randint(self.alphabet, (batch, length), generator=rng)
        product, times = torch.full((batch,), identity(self.group)), products(self.group)
        for place in range(length):
            product = torch.where(present[:, place], times[product, x[:, place]], product)
        return join(
            every(BOS, batch),
            (x + len(SPECIAL), present, False),
            every(SEP, batch),
            every(product + len(SPECIAL), batch, counted=True),
            every(EOS, batch),
        )


@cache
def elements(group: Group) -> list[Permutation]:
    """The elements of a group in the order of their tokens: its generators and then the others."""
    places = permutations(range(int(group[1])))
    rest = (x for x in places if x not in GENERATORS[group] and (group[0] == "S" or _is_even(x)))
    return [*GENERATORS[group], *rest]


def identity(group: Group) -> int:
    """The number of the element that leaves everything where it is."""
    return elements(group).index(tuple(range(int(group[1]))))


@cache
def products(group: Group) -> Tensor:
    """``[first, second]``: the number of the element that does what the first does, and then the second."""
    known = elements(group)
    number = {element: index for index, element in enumerate(known)}
    return torch.tensor([[number[tuple(second[x] for x in first)] for second in known] for first in known])


def _is_even(permutation: Permutation) -> bool:
    return sum(a > b for place, a in enumerate(permutation) for b in permutation[place + 1 :]) % 2 == 0

"""Multi-query associative recall, MQAR (Arora et al. 2023, arXiv 2312.04927): which value came with this key?

    k4 v9 k2 v3 . . k2 -> v3 . . k4 -> v9

Pairs of a key and a value come first; then each key once more, at places with Zoology's power law of gaps and nothing
between (its ``random_non_queries=False``). As there, keys and values are different tokens. Ours: a value stands behind
its key in the second part too, where it must be predicted, and a length has up to a quarter as many pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tra.tasks.base import Batch, Task
from tra.tasks.strings import sample_unique

POWER = 0.01
"""Zoology's: gaps are mostly short."""
TOKENS_PER_PAIR = 4


@dataclass(frozen=True)
class Recall(Task):
    """Every key is asked for once, and every answer counts."""

    name = "recall"
    version = 1
    separator = " "

    keys: int = 256
    """Number of different keys, and of values."""
    mixed: bool = True
    """All numbers of pairs up to a quarter of the tokens, equally likely, instead of exactly that many."""

    def __post_init__(self) -> None:
        if self.keys < 2:
            raise ValueError(f"keys must be at least 2, got {self.keys}")

    @property
    def symbols(self) -> Sequence[str]:
        return (".", *(f"{kind}{index}" for kind in "kv" for index in range(self.keys)))

    def evaluation_sets(self) -> Mapping[str, "Recall"]:
        return {"recall": replace(self, mixed=False)}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        pairs = length // TOKENS_PER_PAIR
        if length < TOKENS_PER_PAIR or length % 2:
            raise ValueError(f"length must be an even number of tokens, at least {TOKENS_PER_PAIR}, got {length}")
        keys = sample_unique(rng, batch, pairs, self.keys, first=1)
        values = sample_unique(rng, batch, pairs, self.keys, first=1 + self.keys)
        numbers = torch.randint(1, pairs + 1, (batch,), generator=rng) if self.mixed else torch.full((batch,), pairs)
        there = torch.arange(pairs) < numbers[:, None]

        # Places for a key and its answer, two tokens each, counted from the end of the pairs that are there.
        space = (length - 2 * numbers) // 2
        weight = torch.arange(1, length // 2 + 1, dtype=torch.float64) ** (POWER - 1.0)
        weight = weight.expand(batch, -1).masked_fill(torch.arange(length // 2) >= space[:, None], 1e-30)
        gap = torch.multinomial(weight, pairs, generator=rng)
        place = 2 * numbers[:, None] + 2 * gap

        tokens = torch.zeros(batch, length + 2, dtype=torch.int64)
        counted = torch.zeros_like(tokens, dtype=torch.bool)
        # What is not there goes to the end, which is cut off.
        first, asked = (torch.where(there, at, length) for at in (2 * torch.arange(pairs), place))
        for start in (first, asked):
            tokens.scatter_(1, start, keys).scatter_(1, start + 1, values)
        counted.scatter_(1, asked + 1, there)
        return Batch(tokens[:, :length], counted[:, :length])

"""Passkey: find a short key in a long text of noise (after Mohtashami and Jaggi 2023, arXiv 2305.16300).

    s3 s8 <key> s5 s1 s7 s9 s9 s4 <ask> -> s5 s1 s7

The symbols after `<ask>` must repeat those after `<key>`, which stands anywhere. All else is noise over the same
alphabet, so that only the place tells a key from noise. The layout is ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tra.tasks.base import Batch, Task

KEY, ASK = range(2)
SYMBOLS = 3
"""Of a key."""


@dataclass(frozen=True)
class Passkey(Task):
    """A key of three symbols, asked for at the end."""

    name = "passkey"
    version = 1
    separator = " "

    alphabet: int = 100
    """Number of different symbols."""

    def __post_init__(self) -> None:
        if self.alphabet < 2:
            raise ValueError(f"alphabet must be at least 2, got {self.alphabet}")

    @property
    def symbols(self) -> Sequence[str]:
        return ("<key>", "<ask>", *(f"s{index}" for index in range(self.alphabet)))

    def evaluation_sets(self) -> Mapping[str, "Passkey"]:
        return {"passkey": self}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        shortest = 2 * SYMBOLS + 2
        if length < shortest:
            raise ValueError(f"length must be at least {shortest} tokens for passkey, got {length}")
        tokens = torch.randint(self.alphabet, (batch, length), generator=rng) + ASK + 1
        asked = length - SYMBOLS - 1
        place = torch.randint(asked - SYMBOLS, (batch, 1), generator=rng)
        tokens.scatter_(1, place, KEY)
        tokens[:, asked] = ASK
        tokens[:, asked + 1 :] = tokens.gather(1, place + 1 + torch.arange(SYMBOLS))
        counted = (torch.arange(length) > asked).expand(batch, -1).contiguous()
        return Batch(tokens, counted)

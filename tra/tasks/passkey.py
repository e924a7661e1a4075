"""Passkey: find a short key in a long text of noise (after Mohtashami and Jaggi 2023, arXiv 2305.16300).

    n3 n8 <key> d5 d1 d7 n9 n9 n4 <ask> -> d5 d1 d7

The digits after `<ask>` must repeat those after `<key>`, which stands anywhere. All else is noise over symbols of its
own, as the original's is of words and its key of digits. No digit is twice in a key. The layout is ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tra.tasks.base import Batch, Task
from tra.tasks.strings import sample_unique

KEY, ASK = range(2)
SPECIAL = ("<key>", "<ask>")
DIGITS = 10
DIGITS_OF_KEY = 3


@dataclass(frozen=True)
class Passkey(Task):
    """A key of three digits, asked for at the end."""

    name = "passkey"
    version = 2
    separator = " "

    noise: int = 100
    """Number of different symbols of noise."""

    def __post_init__(self) -> None:
        if self.noise < 1:
            raise ValueError(f"noise must be at least 1, got {self.noise}")

    @property
    def symbols(self) -> Sequence[str]:
        return (*SPECIAL, *(f"d{index}" for index in range(DIGITS)), *(f"n{index}" for index in range(self.noise)))

    def evaluation_sets(self) -> Mapping[str, "Passkey"]:
        return {"passkey": self}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        shortest = 2 * DIGITS_OF_KEY + 2
        if length < shortest:
            raise ValueError(f"length must be at least {shortest} tokens for passkey, got {length}")
        tokens = torch.randint(self.noise, (batch, length), generator=rng) + len(SPECIAL) + DIGITS
        digits = sample_unique(rng, batch, DIGITS_OF_KEY, DIGITS, first=len(SPECIAL))
        asked = length - DIGITS_OF_KEY - 1
        place = torch.randint(asked - DIGITS_OF_KEY, (batch, 1), generator=rng)
        tokens.scatter_(1, place, KEY)
        tokens.scatter_(1, place + 1 + torch.arange(DIGITS_OF_KEY), digits)
        tokens[:, asked] = ASK
        tokens[:, asked + 1 :] = digits
        counted = (torch.arange(length) > asked).expand(batch, -1).contiguous()
        return Batch(tokens, counted)

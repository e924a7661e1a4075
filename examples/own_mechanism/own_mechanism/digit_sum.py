"""Add up digits, modulo ten.

    3 9 4 = -> 6

Only the last token counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tra.tasks import Batch, Task

EQUALS = 10


@dataclass(frozen=True)
class DigitSum(Task):
    """The sum of a string of digits, each below ``largest + 1``, modulo ten."""

    name = "digit_sum"
    version = 1
    unit = "digits"
    separator = " "

    largest: int = 9
    """The greatest digit that occurs; 1 makes it a count of ones."""

    def __post_init__(self) -> None:
        if not 1 <= self.largest <= 9:
            raise ValueError(f"largest must be a digit from 1 to 9, got {self.largest}")

    @property
    def symbols(self) -> Sequence[str]:
        return [*"0123456789", "="]

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        digits = torch.randint(self.largest + 1, (batch, length), generator=rng)
        answer = digits.sum(dim=1, keepdim=True) % 10
        tokens = torch.cat([digits, torch.full((batch, 1), EQUALS), answer], dim=1)
        counted = torch.zeros_like(tokens, dtype=torch.bool)
        counted[:, -1] = True
        return Batch(tokens, counted)

    def evaluation_sets(self) -> Mapping[str, Task]:
        return {"sum": self}

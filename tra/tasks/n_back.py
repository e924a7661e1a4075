"""n-back: which symbol came two symbols ago?

    s3 . s9 . s4 -> s3 s9 -> s9 s7 -> s4

Behind each symbol stands the one that came ``back`` symbols before it, and counts; the first have none. Attention must
look at a fixed distance, however long the sequence is. After the 2-back task of Vasylenko et al. 2025 (arXiv
2506.16640); the layout and the alphabet are ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tra.tasks.base import Batch, Task


@dataclass(frozen=True)
class NBack(Task):
    """Repeat every symbol after a delay."""

    name = "n_back"
    version = 1
    unit = "symbols"
    separator = " "

    alphabet: int = 32
    """Number of different symbols."""
    back: int = 2
    """The delay, in symbols."""

    def __post_init__(self) -> None:
        if self.alphabet < 2:
            raise ValueError(f"alphabet must be at least 2, got {self.alphabet}")
        if self.back < 1:
            raise ValueError(f"back must be at least 1, got {self.back}")

    @property
    def symbols(self) -> Sequence[str]:
        return (".", *(f"s{index}" for index in range(self.alphabet)))

    def evaluation_sets(self) -> Mapping[str, "NBack"]:
        return {"n_back": self}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        if length <= self.back:
            raise ValueError(f"length must be more than {self.back} symbols for {self.back}-back, got {length}")
        x = torch.randint(1, self.alphabet + 1, (batch, length), generator=rng)
        answer = torch.zeros_like(x)
        answer[:, self.back :] = x[:, : -self.back]
        counted = torch.zeros(batch, length, 2, dtype=torch.bool)
        counted[:, self.back :, 1] = True
        return Batch(torch.stack([x, answer], dim=2).flatten(1), counted.flatten(1))

"""Parity: is the number of ones odd?

    <bos> 1 0 1 1 <sep> -> 1

Only the answer counts. Every symbol matters, so no key may be dropped. Attention averages, and is known to fail at
parity past the training length (Hahn 2020, arXiv 1906.06755; Chiang and Cholak 2022, arXiv 2202.12172). The
layout is ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tra.tasks.base import Batch
from tra.tasks.strings import BOS, EOS, SEP, SPECIAL, StringTask, every, join


@dataclass(frozen=True)
class Parity(StringTask):
    """The sum of a string of bits, modulo 2."""

    name = "parity"
    version = 1

    alphabet: int = 2
    """Always 2."""

    def __post_init__(self) -> None:
        if self.alphabet != 2:
            raise ValueError(f"alphabet must be 2 for {self.name}, got {self.alphabet}")

    @property
    def symbols(self) -> Sequence[str]:
        return (*SPECIAL, "0", "1")

    def evaluation_sets(self) -> Mapping[str, "Parity"]:
        return {"parity": replace(self, mixed=False)}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        lengths = self.sample_lengths(rng, batch, length)
        present = torch.arange(length) < lengths[:, None]
        bits = torch.randint(2, (batch, length), generator=rng)
        answer = self.answer((bits * present).sum(dim=1), lengths)
        return join(
            every(BOS, batch),
            (bits + len(SPECIAL), present, False),
            every(SEP, batch),
            every(answer + len(SPECIAL), batch, counted=True),
            every(EOS, batch),
        )

    def answer(self, ones: Tensor, lengths: Tensor) -> Tensor:
        """0 or 1 ``[B]``, given the number of ones and the number of bits."""
        return ones % 2

"""Induction: what came after this symbol?

    <bos> s3 s9 s4 s7 <sep> s9 -> s4                  once
    <bos> s9 s3 s9 s4 s7 <sep> s9 -> s4               most recent

Only the answer counts. The layout, the alphabets and the number of occurrences are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tra.tasks.base import Batch
from tra.tasks.strings import BOS, EOS, SEP, SPECIAL, StringTask, every, join, sample_unique

MOST_OCCURRENCES = 4


@dataclass(frozen=True)
class InductOnce(StringTask):
    """The symbol asked for occurs once: no symbol repeats."""

    name = "induct_once"
    version = 1
    shortest = 2

    def evaluation_sets(self) -> Mapping[str, "InductOnce"]:
        return {"induct": replace(self, mixed=False)}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        lengths = self.sample_lengths(rng, batch, length)
        x, place = self.sample_string(rng, lengths, length)
        asked, answer = (x.gather(1, where[:, None])[:, 0] for where in (place, place + 1))
        return join(
            every(BOS, batch),
            (x, torch.arange(length) < lengths[:, None], False),
            every(SEP, batch),
            every(asked, batch),
            every(answer, batch, counted=True),
            every(EOS, batch),
        )

    def sample_string(self, rng: torch.Generator, lengths: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Strings ``[B, length]``, and the place in each of the occurrence that counts."""
        x = sample_unique(rng, len(lengths), length, self.alphabet, first=len(SPECIAL))
        return x, (torch.rand(len(lengths), generator=rng) * (lengths - 1)).long()


@dataclass(frozen=True)
class InductRecent(InductOnce):
    """The symbol asked for occurs two to four times, and the last occurrence counts; others repeat at random."""

    name = "induct_recent"
    shortest = 3

    def sample_string(self, rng: torch.Generator, lengths: Tensor, length: int) -> tuple[Tensor, Tensor]:
        batch = len(lengths)
        asked = torch.randint(self.alphabet, (batch, 1), generator=rng)
        other = torch.randint(self.alphabet - 1, (batch, length), generator=rng)
        most = (lengths - 1).clamp(max=MOST_OCCURRENCES)
        occurrences = 2 + (torch.rand(batch, generator=rng) * (most - 1)).long()
        # Any places but the last of the string, which has no symbol after it.
        priority = torch.rand(batch, length, generator=rng)
        priority = priority.masked_fill(torch.arange(length) >= lengths[:, None] - 1, 2.0)
        is_asked = priority.argsort(dim=1).argsort(dim=1) < occurrences[:, None]
        x = torch.where(is_asked, asked, other + (other >= asked)) + len(SPECIAL)
        return x, torch.where(is_asked, torch.arange(length), -1).amax(dim=1)

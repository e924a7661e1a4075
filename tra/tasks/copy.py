"""Copy a string.

    <bos> s3 s9 s4 <sep> -> s3 s9 s4 <eos>

Everything after `<sep>` counts. The symbols of `CopyUnique` are all different, those of `CopyRepeat` repeat. The layout
and the alphabets are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tra.tasks.base import Batch
from tra.tasks.strings import BOS, EOS, SEP, SPECIAL, StringTask, every, join, sample_unique


@dataclass(frozen=True)
class CopyUnique(StringTask):
    """All symbols of the string differ, so it is enough to find the last symbol written."""

    name = "copy_unique"
    version = 1

    def evaluation_sets(self) -> Mapping[str, "CopyUnique"]:
        return {"copy": replace(self, mixed=False)}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        lengths = self.sample_lengths(rng, batch, length)
        x = self.sample_string(rng, batch, length)
        present = torch.arange(length) < lengths[:, None]
        return join(
            every(BOS, batch),
            (x, present, False),
            every(SEP, batch),
            (*self.answer(x, present), True),
            every(EOS, batch, counted=True),
        )

    def answer(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """The answer to strings ``[B, length]``, and which of its symbols exist."""
        return x, present

    def sample_string(self, rng: torch.Generator, batch: int, length: int) -> Tensor:
        return sample_unique(rng, batch, length, self.alphabet, first=len(SPECIAL))


@dataclass(frozen=True)
class CopyRepeat(CopyUnique):
    """Symbols repeat, so the place in the string matters."""

    name = "copy_repeat"

    def sample_string(self, rng: torch.Generator, batch: int, length: int) -> Tensor:
        return torch.randint(self.alphabet, (batch, length), generator=rng) + len(SPECIAL)

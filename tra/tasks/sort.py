"""Sort a string.

    <bos> s7 s3 s9 s3 <sep> -> s3 s3 s7 s9 <eos>

Everything after `<sep>` counts. Symbols repeat and are ordered by their numbers. A task of Vasylenko et al. 2025 (arXiv
2506.16640); the layout and the alphabet are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tra.tasks.copy import CopyRepeat


@dataclass(frozen=True)
class Sort(CopyRepeat):
    """The symbols of the string in order."""

    name = "sort"
    version = 1

    alphabet: int = 32

    def evaluation_sets(self) -> Mapping[str, "Sort"]:
        return {"sort": replace(self, mixed=False)}

    def answer(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        largest = torch.iinfo(x.dtype).max
        ordered = x.masked_fill(~present, largest).sort(dim=1).values
        return ordered, ordered < largest

"""Reverse a string.

    <bos> s3 s9 s4 <sep> -> s4 s9 s3 <eos>

Everything after `<sep>` counts. Symbols repeat. A task of Vasylenko et al. 2025 (arXiv 2506.16640); the layout and the
alphabet are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from tra.tasks.copy import CopyRepeat


@dataclass(frozen=True)
class Reverse(CopyRepeat):
    """The symbols of the string from the last to the first."""

    name = "reverse"
    version = 1

    alphabet: int = 32

    def evaluation_sets(self) -> Mapping[str, "Reverse"]:
        return {"reverse": replace(self, mixed=False)}

    def answer(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        return x.flip(1), present.flip(1)

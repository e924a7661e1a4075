"""Majority: are there more ones than zeros?

    <bos> 1 0 1 1 <sep> -> 1

Only the answer counts; it is 0 for equal numbers. Every symbol matters equally, the opposite of retrieval: attention
that averages all of them solves it at any length (Merrill et al. 2022, arXiv 2106.16213). The layout is that of parity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from tra.tasks.parity import Parity


@dataclass(frozen=True)
class Majority(Parity):
    """The more frequent of two symbols."""

    name = "majority"
    version = 1

    def evaluation_sets(self) -> Mapping[str, "Majority"]:
        return {"majority": replace(self, mixed=False)}

    def answer(self, ones: Tensor, lengths: Tensor) -> Tensor:
        return (2 * ones > lengths).long()

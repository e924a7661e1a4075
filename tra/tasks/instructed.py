"""Instructed strings: one model, several instructions on a string.

    copy s3 s9 s4 <sep> -> s3 s9 s4 <eos>             next s9 s3 s9 s4 <sep> -> s4 <eos>
    reverse s3 s9 s4 <sep> -> s4 s9 s3 <eos>          previous s9 s3 s9 s4 <sep> -> s3 <eos>
    last s3 s9 s4 <sep> -> s4 <eos>                   drop s9 s9 s3 s9 s4 <sep> -> s3 s4 <eos>

Everything after `<sep>` counts. The set of instructions, the layout and the alphabet are ours. Symbols repeat; `next`
and `previous` mean the most recent occurrence that has such a neighbour, and nothing where there is none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tra.lookup import lookup
from tra.tasks.base import Batch
from tra.tasks.strings import EOS, SEP, SPECIAL, StringTask, every, join

Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps strings x ``[B, m]``, -1 past their end, and symbols q ``[B, 1]`` to ``(y, present)``, both ``[B, m]``."""

WITHOUT_SYMBOL: dict[str, Rule] = {
    "copy": lambda x, q: (x, x >= 0),
    "reverse": lambda x, q: (x.flip(1), x.flip(1) >= 0),
    "last": lambda x, q: (x, only_last(x >= 0)),
}
WITH_SYMBOL: dict[str, Rule] = {
    "next": lambda x, q: (x, only_last(shifted(x == q, 1) & (x >= 0))),
    "previous": lambda x, q: (x, only_last(shifted(x == q, -1))),
    "drop": lambda x, q: (x, (x >= 0) & (x != q)),
}
RULES = WITHOUT_SYMBOL | WITH_SYMBOL


@dataclass(frozen=True)
class Instructed(StringTask):
    """Follow one of several instructions, named by the first token."""

    name = "instructed"
    version = 1
    shortest = 0

    instruction: str | None = None
    """The only instruction to give; all of them by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.instruction is not None:
            lookup(RULES, self.instruction, "instruction")

    @property
    def symbols(self) -> Sequence[str]:
        return (*super().symbols, *RULES)

    def evaluation_sets(self) -> Mapping[str, "Instructed"]:
        return {
            "all": replace(self, mixed=False),
            **{name: replace(self, mixed=False, instruction=name) for name in RULES},
        }

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        lengths = self.sample_lengths(rng, batch, length)
        x = torch.randint(self.alphabet, (batch, length), generator=rng)
        x = x.masked_fill(torch.arange(length) >= lengths[:, None], -1)
        # A symbol of the string, so that it occurs; any symbol where the string is empty.
        place = (torch.rand(batch, generator=rng) * lengths).long()
        anything = torch.randint(self.alphabet, (batch, 1), generator=rng)
        q = torch.where(lengths[:, None] > 0, torch.cat([x, anything], dim=1).gather(1, place[:, None]), anything)
        which = torch.randint(len(RULES), (batch,), generator=rng)
        if self.instruction is not None:
            which.fill_(list(RULES).index(self.instruction))

        y, present = torch.full_like(x, -1), torch.zeros_like(x, dtype=torch.bool)
        for index, rule in enumerate(RULES.values()):
            rows = which == index
            y[rows], present[rows] = rule(x[rows], q[rows])
        first = len(SPECIAL)
        return join(
            every(which + first + self.alphabet, batch),
            (q + first, (which >= len(WITHOUT_SYMBOL))[:, None], False),
            (x + first, x >= 0, False),
            every(SEP, batch),
            (y + first, present, True),
            every(EOS, batch, counted=True),
        )


def only_last(chosen: Tensor) -> Tensor:
    """Of the True entries of each row, the last."""
    return chosen & (chosen.flip(1).cumsum(dim=1).flip(1) == 1)


def shifted(chosen: Tensor, by: int) -> Tensor:
    """Every entry moved right by 1 or left by 1, False where none arrives."""
    moved = chosen.roll(by, dims=1)
    moved[:, slice(0, 1) if by > 0 else slice(-1, None)] = False
    return moved

"""What the string tasks share: special tokens, an alphabet, and sequences of different lengths in one batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tra.tasks.base import Batch, Task

PAD, BOS, SEP, EOS = range(4)
SPECIAL = ("<pad>", "<bos>", "<sep>", "<eos>")


@dataclass(frozen=True)
class StringTask(Task):
    """A task on a string x over an alphabet, whose length is counted in symbols of x.

    Training mixes all lengths up to the one asked for; evaluation sets hold one length each.
    """

    unit = "symbols"
    separator = " "
    shortest = 1
    """Symbols that x must have."""

    alphabet: int = 100
    """Number of different symbols."""
    mixed: bool = True
    """Sequences of all lengths up to the one asked for, equally likely, instead of exactly that one."""

    def __post_init__(self) -> None:
        if self.alphabet < 2:
            raise ValueError(f"alphabet must be at least 2, got {self.alphabet}")

    @property
    def symbols(self) -> Sequence[str]:
        return (*SPECIAL, *(f"s{index}" for index in range(self.alphabet)))

    def sample_lengths(self, rng: torch.Generator, batch: int, length: int) -> Tensor:
        """Symbols of each sequence ``[B]``."""
        if length < self.shortest:
            raise ValueError(f"length must be at least {self.shortest} symbols for {self.name}, got {length}")
        if not self.mixed:
            return torch.full((batch,), length)
        return torch.randint(self.shortest, length + 1, (batch,), generator=rng)


def sample_unique(rng: torch.Generator, batch: int, length: int, alphabet: int, first: int) -> Tensor:
    """``[B, length]`` tokens from ``first`` on, none twice in a row of the result."""
    if length > alphabet:
        raise ValueError(f"length must be at most the alphabet of {alphabet} for symbols without repeats, got {length}")
    return torch.rand(batch, alphabet, generator=rng).argsort(dim=1)[:, :length] + first


def join(*parts: tuple[Tensor, Tensor, bool]) -> Batch:
    """Concatenate parts of different lengths row by row and pad at the end.

    Each part is ``(tokens [B, m], present [B, m], counted)``: its tokens, which of them exist, and whether they must
    be predicted.
    """
    present = torch.cat([present for _, present, _ in parts], dim=1)
    # A stable sort by absence brings the tokens that exist to the front and keeps their order.
    order = (~present).to(torch.uint8).argsort(dim=1, stable=True)
    tokens = torch.cat([tokens for tokens, _, _ in parts], dim=1).masked_fill(~present, PAD)
    counted = torch.cat([present if counted else torch.zeros_like(present) for _, present, counted in parts], dim=1)
    return Batch(tokens.gather(1, order), counted.gather(1, order))


def every(token: Tensor | int, batch: int, *, counted: bool = False) -> tuple[Tensor, Tensor, bool]:
    """A part of one token per row."""
    tokens = torch.as_tensor(token).expand(batch)[:, None]
    return tokens, torch.ones_like(tokens, dtype=torch.bool), counted

"""Flip-flop language modelling (Liu et al. 2023, arXiv 2306.00946): remember one bit, ignore the rest.

    w1 i0 i0 r -> 1      w1 i1 w0 i1 r -> 0

A sequence is (instruction, bit) pairs, one token per character. The bit after `r` (read) repeats the last bit
after a `w` (write); bits after `i` (ignore) are noise. Only the bits after `r` count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tra.lookup import lookup
from tra.tasks.base import Batch, Task

WRITE, READ, IGNORE, ZERO, ONE = range(5)

HUB_COPY = "synthseq/flipflop"
HUB_SPLITS = {"train": "train", "iid": "val", "sparse": "val_sparse", "dense": "val_dense"}
"""Our names of the splits of the copy that the task's authors published."""


@dataclass(frozen=True)
class FlipFlop(Task):
    """The first instruction is `w` and the last `r`; the others are independent."""

    name = "flip_flop"
    version = 1
    symbols = ("w", "r", "i", "0", "1", "<pad>")

    ignore: float = 0.8
    """Probability of `i`; `w` and `r` share the rest equally."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.ignore <= 1.0:
            raise ValueError(f"ignore must be a probability in [0, 1], got {self.ignore!r}")

    def evaluation_sets(self) -> Mapping[str, "FlipFlop"]:
        return {"iid": FlipFlop(0.8), "sparse": FlipFlop(0.98), "dense": FlipFlop(0.1)}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        if length < 4 or length % 2:
            raise ValueError(f"length must be an even number of tokens, at least 4, got {length}")
        pairs = length // 2
        chance = torch.rand(batch, pairs, generator=rng)
        instruction = torch.full((batch, pairs), IGNORE)
        instruction[chance >= self.ignore] = READ
        instruction[chance >= self.ignore + (1.0 - self.ignore) / 2] = WRITE
        instruction[:, 0] = WRITE
        instruction[:, -1] = READ

        bit = torch.randint(2, (batch, pairs), generator=rng)
        position_of_write = torch.where(instruction == WRITE, torch.arange(pairs), 0)
        last_write = position_of_write.cummax(dim=1).values
        bit = torch.where(instruction == READ, bit.gather(1, last_write), bit)
        return as_batch(torch.stack([instruction, bit + ZERO], dim=2).flatten(1))

    def published(self, split: str, folder: Path | None = None) -> Batch:
        """The copy on the hub, or a folder of its parquet files. Tokens are uint8: "train" takes 0.8 GB."""
        import numpy
        from datasets import load_dataset

        name = lookup(HUB_SPLITS, split, "split")
        if folder is None:
            rows = load_dataset(HUB_COPY, split=name)
        else:
            files = sorted(str(path) for path in Path(folder).rglob(f"{name}-*.parquet"))
            if not files:
                raise ValueError(f"data must be a folder with {name}-*.parquet files, found none in {folder}")
            rows = load_dataset("parquet", data_files={name: files}, split=name)

        code = numpy.full(256, 255, dtype=numpy.uint8)
        for token, symbol in enumerate(FlipFlop.symbols[: ONE + 1]):
            code[ord(symbol)] = token
        parts = []
        for block in rows.iter(batch_size=10_000):
            lengths = {len(text) for text in block["text"]}
            if len(lengths) != 1:
                raise ValueError(f"data must hold sequences of one length, found lengths {sorted(lengths)} in {name}")
            text = "".join(block["text"]).encode("ascii", "replace")
            characters = numpy.frombuffer(text, dtype=numpy.uint8)
            tokens = code[characters].reshape(-1, lengths.pop())
            if (tokens == 255).any():
                raise ValueError(f"data must hold strings over 'wri01', found another character in split {name}")
            parts.append(torch.from_numpy(tokens))
        return as_batch(torch.cat(parts))


def as_batch(tokens: Tensor) -> Batch:
    """Count the token after each `r`."""
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    counted[:, 1:] = tokens[:, :-1] == READ
    return Batch(tokens, counted)

"""The contract of a task."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tra.lookup import lookup

CHUNK = 64
"""Sequences drawn from one generator in an evaluation set."""


@dataclass(frozen=True)
class Batch:
    """Sequences, and which of their tokens must be predicted."""

    tokens: Tensor
    """``[B, L]`` integers."""
    counted: Tensor
    """``[B, L]`` boolean: True where the token enters loss and metric."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> "Batch":
        return Batch(self.tokens[rows], self.counted[rows])

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.tokens.to(device, torch.int64), self.counted.to(device))


class Task(ABC):
    """A distribution over sequences of any length, with named variations of it for evaluation."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Raised whenever the same generator would give other sequences."""
    unit: ClassVar[str] = "tokens"
    """What a length counts."""
    measure: ClassVar[str] = "exact_match"
    """What says how well a model does: exact_match of whole sequences, or perplexity."""
    separator: ClassVar[str] = ""
    """Between symbols when a sequence is written out."""

    @property
    @abstractmethod
    def symbols(self) -> Sequence[str]:
        """The vocabulary: token i is written as ``symbols[i]``."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self.symbols)

    def extent(self, name: str, length: int, examples: int | None) -> tuple[int, int]:
        """Words and bytes of what an evaluation reads, where the measure is perplexity."""
        raise NotImplementedError

    @abstractmethod
    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        """Draw a batch of sequences of the given length in the task's unit."""

    @abstractmethod
    def evaluation_sets(self) -> Mapping[str, "Task"]:
        """The named evaluation sets, each as the task to draw it from."""

    def published(self, split: str, folder: Path | None = None) -> Batch:
        """A split of a copy that the task's authors published, from the hub or a folder; "train" is to train on, the
        others are named as the evaluation sets."""
        raise ValueError(f"data must be 'fresh' or 'fixed': there is no published copy of {self.name}")

    def evaluation_batches(
        self, name: str, length: int, examples: int | None, batch: int, stride: int | None = None
    ) -> Iterator[Batch]:
        """The first ``examples`` sequences of a named set, which depends on the name and length alone."""
        if examples is None or examples < 1:
            raise ValueError(f"examples must be at least 1, got {examples}")
        if stride is not None:
            raise ValueError(f"stride must be None for {self.name}, which is no text, got {stride}")
        task = lookup(self.evaluation_sets(), name, "evaluation set")
        for start in range(0, examples, CHUNK):
            rng = seeded(self.name, self.version, "evaluation", name, length, start)
            chunk = task.sample(rng, CHUNK, length)[: examples - start]
            for first in range(0, len(chunk), batch):
                yield chunk[first : first + batch]

    def example(self, length: int) -> tuple[Tensor, list[str]]:
        """Always the same sequence of a length ``[L]``, and its symbols one by one."""
        tokens = self.sample(seeded("heatmap", 0), 1, length).tokens[0]
        symbols = self.symbols
        return tokens, [symbols[token] for token in tokens.tolist()]

    def tokenizer_json(self) -> str | None:
        """The tokenizer, where the task has one."""
        return None

    def read(self, text: str) -> tuple[Tensor, list[str]]:
        """A text as tokens ``[L]``, and each of them written out."""
        raise NotImplementedError

    def text(self, tokens: Tensor) -> str:
        """One sequence ``[L]`` written out."""
        symbols = self.symbols
        return self.separator.join(symbols[token] for token in tokens.tolist())


def seeded(*key: object) -> torch.Generator:
    """A CPU generator whose stream depends on the key alone."""
    return torch.Generator().manual_seed(seed_of(*key))


def seed_of(*key: object) -> int:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

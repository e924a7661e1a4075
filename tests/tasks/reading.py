"""Sequences of the string tasks as lists of words, for solvers in plain Python."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

import torch

from tra.tasks import Task


def read(task: Task, length: int, batch: int, seed: int) -> Iterator[tuple[list[str], list[int]]]:
    """The words of each sequence up to its padding, and the positions that count, all of them before it."""
    sample, symbols = task.sample(torch.Generator().manual_seed(seed), batch, length), task.symbols
    assert len(sample) == batch
    assert sample.tokens.shape == sample.counted.shape
    for tokens, counted in zip(sample.tokens.tolist(), sample.counted.tolist(), strict=True):
        words = [symbols[token] for token in tokens]
        end = words.index("<eos>") + 1
        assert words[end:] == ["<pad>"] * len(words[end:])
        yield words[:end], [position for position, counts in enumerate(counted) if counts]


def assert_even(drawn: Iterable[Hashable], kinds: Iterable[Hashable]) -> None:
    """Every kind, and nothing else, was drawn about equally often."""
    counts, kinds = Counter(drawn), set(kinds)
    expected = counts.total() / len(kinds)
    assert set(counts) == kinds
    assert all(abs(count - expected) < 4 * math.sqrt(expected) for count in counts.values()), counts

"""Language modelling: predict the next token of real text."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy
import torch
from rich.console import Console
from tokenizers import Tokenizer

from tra.lookup import lookup
from tra.tasks import Batch, Task
from tra.text.source import Source
from tra.text.tokenizer import is_trained, load_tokenizer, size_of
from tra.text.tokens import Tokens, prepare

SPLITS = ("valid", "test")


class Text(Task):
    """Windows of a text. A window of n tokens has n + 1, of which all but the first are predicted.

    Nothing is read before it is needed; tokens are kept in the folder $TRA_CACHE, by default ~/.cache/tra.

    Args:
        train: text to train on, as for :class:`Source`.
        evaluation: text to be measured on, that to train on by default.
        tokenizer: as for :func:`load_tokenizer`.
    """

    name: ClassVar[str] = "text"
    version: ClassVar[int] = 1
    measure: ClassVar[str] = "perplexity"

    def __init__(self, train: str, evaluation: str | None, tokenizer: str, console: Console | None = None) -> None:
        self.train, self.evaluation, self.tokenizer_name = train, evaluation or train, tokenizer
        self.console = console or Console(quiet=True)
        self._splits: dict[str, Tokens] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        source = Source(self.train) if is_trained(self.tokenizer_name) else None
        return load_tokenizer(self.tokenizer_name, source, cache_folder(), self.console)

    @property
    def symbols(self) -> Sequence[str]:
        """Each token as text."""
        return [self.tokenizer.decode([token]) for token in range(self.vocabulary)]

    @property
    def vocabulary(self) -> int:
        return size_of(self.tokenizer)

    def tokens(self, split: str) -> Tokens:
        """The tokens of a split."""
        if split not in self._splits:
            source = Source(self.train if split == "train" else self.evaluation)
            self._splits[split] = prepare(source, split, self.tokenizer, cache_folder(), self.console)
        return self._splits[split]

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        """Windows of the training text that begin anywhere."""
        tokens = self.tokens("train").read()
        if len(tokens) <= length:
            raise ValueError(f"length must be less than the {len(tokens):,} tokens of {self.train}, got {length}")
        starts = torch.randint(len(tokens) - length, (batch,), generator=rng).tolist()
        return _batch([tokens[start : start + length + 1] for start in starts], [length] * batch)

    def evaluation_sets(self) -> Mapping[str, Task]:
        return dict.fromkeys(SPLITS, self)

    def evaluation_batches(
        self, name: str, length: int, examples: int | None, batch: int, stride: int | None = None
    ) -> Iterator[Batch]:
        """Windows over the beginning of a split, as many tokens as in ``examples`` windows side by side.

        Every token but the first is predicted exactly once: in windows side by side, or, with a stride, in windows
        that move on by the stride and predict only what none before them did. Sliding windows are all full, the
        last one too, unless the text is shorter than one.
        """
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if examples is not None and examples < 1:
            raise ValueError(f"examples must be at least 1, got {examples}")
        if stride is not None and not 1 <= stride <= length:
            raise ValueError(f"stride must be between 1 and the window of {length}, got {stride}")
        tokens = self._read(name, length, examples)
        for _, alike in groupby(_windows(len(tokens) - 1, length, stride), lambda window: window.last - window.first):
            while some := list(islice(alike, batch)):
                yield _batch([tokens[at.first : at.last + 1] for at in some], [at.new for at in some])

    def extent(self, name: str, length: int, examples: int | None) -> tuple[int, int]:
        """Words and bytes of the text that an evaluation reads."""
        tokens, split = self._read(name, length, examples), self.tokens(name)
        if len(tokens) == split.count:
            return split.words, split.bytes
        text = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        return len(text.split()), len(text.encode())

    def tokenizer_json(self) -> str:
        return self.tokenizer.to_str(pretty=True)

    def read(self, text: str) -> tuple[torch.Tensor, list[str]]:
        """A text as tokens, and each of them written out."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise ValueError(f"text must have at least one token, got {text!r}")
        return torch.tensor(ids), [self.tokenizer.decode([token]) for token in ids]

    def text(self, tokens: torch.Tensor) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    def _read(self, name: str, length: int, examples: int | None) -> numpy.ndarray:
        lookup(self.evaluation_sets(), name, "evaluation set")
        tokens = self.tokens(name).read()
        if len(tokens) < 2:
            raise ValueError(
                f"text must have at least 2 tokens to predict one, but {name} of {self.evaluation} has not"
            )
        return tokens if examples is None else tokens[: examples * length + 1]


def cache_folder() -> Path:
    """Where tokenizers and tokens are kept."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tra"
    return Path(os.environ.get("TRA_CACHE") or usual)


class _Window(NamedTuple):
    """Tokens first to last, of which the ``new`` last are predicted; the others are context."""

    first: int
    last: int
    new: int


def _windows(last_token: int, length: int, stride: int | None) -> Iterator[_Window]:
    done = 0
    while done < last_token:
        last = min(done + (stride if stride and done else length), last_token)
        yield _Window(max(0, last - length) if stride else done, last, last - done)
        done = last


def _batch(rows: Sequence[numpy.ndarray], new: Sequence[int]) -> Batch:
    """Rows of equal length, of each of which the last few tokens count."""
    tokens = torch.from_numpy(numpy.stack(rows).astype(numpy.int64))
    from_end = torch.arange(tokens.shape[1]).flip(0)
    return Batch(tokens, from_end < torch.tensor(new)[:, None])

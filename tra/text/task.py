"""Language modelling: predict the next token of real text."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy
import torch
from tokenizers import Tokenizer

from tra.lookup import lookup
from tra.tasks.base import Batch, ReadsText, Task
from tra.tasks.measures import Evaluation, Perplexity, Prediction, Result
from tra.text.source import Source
from tra.text.tokenizer import encoded, is_trained, load_tokenizer, size_of
from tra.text.tokens import Tokens, prepare

SPLITS = ("valid", "test")


class Text(Task, ReadsText):
    """Windows of a text. A window of n tokens has n + 1, of which all but the first are predicted.

    Nothing is read before it is needed; tokens are kept in the folder $TRA_CACHE, by default ~/.cache/tra.

    Args:
        train: text to train on, as for :class:`Source`.
        evaluation: text to be measured on, that to train on by default.
        tokenizer: as for :func:`load_tokenizer`.
    """

    name: ClassVar[str] = "text"
    version: ClassVar[int] = 1
    measure: ClassVar[type[Result]] = Perplexity

    def __init__(self, train: str, evaluation: str | None, tokenizer: str) -> None:
        self.train, self.evaluation, self.tokenizer_name = train, evaluation or train, tokenizer
        self._sources: dict[str, Source] = {}
        self._splits: dict[str, Tokens] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        source = self._source(self.train) if is_trained(self.tokenizer_name) else None
        return load_tokenizer(self.tokenizer_name, source, cache_folder())

    def with_tokenizer(self, folder: Path) -> "Text":
        return Text(self.train, self.evaluation, str(folder.absolute()))

    def texts(self) -> tuple[str, str]:
        return self.train, self.evaluation

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
            source = self._source(self.train if split == "train" else self.evaluation)
            self._splits[split] = prepare(source, split, self.tokenizer, cache_folder())
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

    def check(self, vocabulary: int, length: int, evaluations: Sequence[Evaluation]) -> None:
        """By the arguments alone: the text is not read before a run begins."""
        for entry in evaluations:
            self._check(entry)

    def prepare(self, vocabulary: int, length: int, evaluations: Sequence[Evaluation]) -> None:
        """Make the tokenizer and the tokens, or find them in the cache."""
        super().check(vocabulary, length, ())
        for entry in evaluations:
            next(self.evaluation_batches(entry, 1))

    def evaluation_batches(self, evaluation: Evaluation, batch: int) -> Iterator[Batch]:
        """Windows over the beginning of a split, as many tokens as in ``examples`` windows side by side.

        Every token but the first is predicted exactly once: in windows side by side, or, with a stride, in windows
        that move on by the stride and predict only what none before them did. Sliding windows are all full, the
        last one too, unless the text is shorter than one.
        """
        self._check(evaluation)
        tokens = self._measured(evaluation)
        windows = _windows(len(tokens) - 1, evaluation.length, evaluation.stride)
        for _, alike in groupby(windows, lambda window: window.last - window.first):
            while some := list(islice(alike, batch)):
                yield _batch([tokens[at.first : at.last + 1] for at in some], [at.new for at in some])

    def score(self, evaluation: Evaluation, predictions: Iterable[Prediction]) -> Result:
        return Perplexity.of(evaluation, predictions, *self.extent(evaluation))

    def extent(self, evaluation: Evaluation) -> tuple[int, int]:
        """Words and bytes of the text that an evaluation reads."""
        tokens, split = self._measured(evaluation), self.tokens(evaluation.name)
        if len(tokens) == split.count:
            return split.words, split.bytes
        text = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        return len(text.split()), len(text.encode())

    def usual_examples(self, evaluations: Sequence[Evaluation], name: str, length: int) -> int | None:
        """Every length reads the same tokens."""
        tokens = [entry.length * entry.examples for entry in evaluations if entry.examples is not None]
        return max(1, max(tokens) // max(1, length)) if tokens else None

    def rescaled(self, evaluation: Evaluation, factor: Fraction) -> Evaluation:
        """Of the same tokens."""
        longer, stride, examples = super().rescaled(evaluation, factor), evaluation.stride, evaluation.examples
        return replace(
            longer,
            stride=None if stride is None else max(1, round(stride * factor)),
            examples=None if examples is None else max(1, examples * evaluation.length // longer.length),
        )

    def tokens_in(self, length: int) -> int:
        return length + 1

    def example(self, length: int, seed: int = 0) -> tuple[torch.Tensor, list[str]]:
        """The first tokens of the validation text."""
        tokens = self.tokens("valid").read()[:length].tolist()
        return torch.tensor(tokens), [self.tokenizer.decode([token]) for token in tokens]

    def read(self, text: str) -> tuple[torch.Tensor, list[str]]:
        """A text as tokens, and each of them written out."""
        ids = encoded(self.tokenizer, text)
        if not ids:
            raise ValueError(f"text must have at least one token, got {text!r}")
        return torch.tensor(ids), [self.tokenizer.decode([token]) for token in ids]

    def text(self, tokens: torch.Tensor) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    def _source(self, name: str) -> Source:
        """Made once for each text: to know its contents takes a pass over them."""
        if name not in self._sources:
            self._sources[name] = Source(name)
        return self._sources[name]

    def _check(self, evaluation: Evaluation) -> None:
        lookup(self.evaluation_sets(), evaluation.name, "evaluation set")
        if evaluation.length < 1:
            raise ValueError(f"length must be at least 1, got {evaluation.length}")
        if evaluation.examples is not None and evaluation.examples < 1:
            raise ValueError(f"examples must be at least 1, got {evaluation.examples}")
        if evaluation.stride is not None and not 1 <= evaluation.stride <= evaluation.length:
            raise ValueError(f"stride must be between 1 and the window of {evaluation.length}, got {evaluation.stride}")

    def _measured(self, evaluation: Evaluation) -> numpy.ndarray:
        """The tokens that an evaluation reads."""
        name = evaluation.name
        tokens = self.tokens(name).read()
        if len(tokens) < 2:
            raise ValueError(
                f"text must have at least 2 tokens to predict one, but {name} of {self.evaluation} has not"
            )
        return tokens if evaluation.examples is None else tokens[: evaluation.examples * evaluation.length + 1]


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

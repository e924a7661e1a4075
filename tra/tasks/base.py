"""The contract of a task."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from tra.lookup import lookup
from tra.tasks.measures import Evaluation, ExactMatch, Prediction, Result

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK = 64
"""Sequences that one generator gives in an evaluation set."""
USUAL_EXAMPLES = 100


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
    """A distribution over sequences of any length, with named variations of it for evaluation.

    Its options determine a task completely. Usually it is a frozen dataclass and its fields are the options.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    """Raised whenever the same generator would give other sequences."""
    unit: ClassVar[str] = "tokens"
    """What a length counts."""
    measure: ClassVar[type[Result]] = ExactMatch
    """The type of its results: exact match, or another measure."""
    separator: ClassVar[str] = ""
    """Text between symbols when a sequence is written out."""

    @property
    @abstractmethod
    def symbols(self) -> Sequence[str]:
        """The vocabulary: token i is written as ``symbols[i]``."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self.symbols)

    @abstractmethod
    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        """A batch of sequences of the given length in the task's unit, from the generator alone."""

    @abstractmethod
    def evaluation_sets(self) -> Mapping[str, "Task"]:
        """The named evaluation sets, each as the task it is sampled from."""

    def evaluation_batches(self, evaluation: Evaluation, batch: int) -> Iterator[Batch]:
        """The first sequences of a named set, ``batch`` at a time; they depend on the name and length alone."""
        task, name, length = self.evaluation_set(evaluation), evaluation.name, evaluation.length
        examples = evaluation.examples
        assert examples is not None
        for start in range(0, examples, CHUNK):
            rng = seeded(self.name, self.version, "evaluation", name, length, start)
            chunk = task.sample(rng, CHUNK, length)[: examples - start]
            for first in range(0, len(chunk), batch):
                yield chunk[first : first + batch]

    def evaluation_set(self, evaluation: Evaluation) -> "Task":
        """The task that an evaluation is sampled from; a ValueError names what does not fit."""
        if evaluation.examples is None or evaluation.examples < 1:
            raise ValueError(f"examples must be at least 1, got {evaluation.examples}")
        if evaluation.stride is not None:
            raise ValueError(f"stride must be None for {self.name}, which is no text, got {evaluation.stride}")
        return lookup(self.evaluation_sets(), evaluation.name, "evaluation set")

    def score(self, evaluation: Evaluation, predictions: Iterable[Prediction]) -> Result:
        """The result of predictions on an evaluation's batches."""
        return ExactMatch.of(evaluation, predictions)

    def usual_examples(self, evaluations: Sequence[Evaluation], name: str, length: int) -> int | None:
        """Default number of sequences to measure, given the evaluations of a recipe."""
        same = (entry.examples for entry in evaluations if (entry.name, entry.length) == (name, length))
        return next(same, USUAL_EXAMPLES)

    def rescaled(self, evaluation: Evaluation, factor: Fraction) -> Evaluation:
        """An evaluation with its length multiplied by a factor."""
        return replace(evaluation, length=max(1, round(evaluation.length * factor)))

    def check(self, vocabulary: int, length: int, evaluations: Sequence[Evaluation]) -> None:
        """Raise a ValueError, before training, for a vocabulary, length or set that does not fit the task."""
        if vocabulary < self.vocabulary:
            raise ValueError(f"model.vocabulary must be at least {self.vocabulary} for {self.name}, got {vocabulary}")
        self.sample(torch.Generator(), 1, length)
        for entry in evaluations:
            self.evaluation_set(entry).sample(torch.Generator(), 1, entry.length)

    def prepare(self, vocabulary: int, length: int, evaluations: Sequence[Evaluation]) -> None:
        """Slow preparation before the first step, then the checks that need it."""
        self.check(vocabulary, length, evaluations)

    def tokens_in(self, length: int) -> int:
        """Tokens of the longest training sequence of a length in the task's unit."""
        return self.sample(torch.Generator(), 1, length).tokens.shape[1]

    def published(self, split: str, folder: Path | None = None) -> Batch:
        """A split of a copy that the task's authors published, from the hub or a folder: "train", or the name of an
        evaluation set."""
        raise ValueError(f"data must be 'fresh' or 'fixed': there is no published copy of {self.name}")

    def example(self, length: int, seed: int = 0) -> tuple[Tensor, list[str]]:
        """Always the same sequence of a length ``[L]``, and its symbols one by one."""
        tokens = self.sample(seeded("heatmap", seed), 1, length).tokens[0]
        symbols = self.symbols
        return tokens, [symbols[token] for token in tokens.tolist()]

    def text(self, tokens: Tensor) -> str:
        """One sequence ``[L]`` written out."""
        symbols = self.symbols
        return self.separator.join(symbols[token] for token in tokens.tolist())


class ReadsText(ABC):
    """Additional interface of tasks on text: a tokenizer, and reading of any text."""

    @property
    @abstractmethod
    def tokenizer(self) -> "Tokenizer": ...

    @abstractmethod
    def read(self, text: str) -> tuple[Tensor, list[str]]:
        """A text as tokens ``[L]``, and each of them written out."""

    @abstractmethod
    def with_tokenizer(self, folder: Path) -> Task:
        """The same task with the tokenizer in a folder, because the text that trained it may be gone."""

    @abstractmethod
    def texts(self) -> tuple[str, str]:
        """Names of the training text and of the evaluation text."""

    def tokenizer_json(self) -> str:
        return self.tokenizer.to_str(pretty=True)


def seeded(*key: object) -> torch.Generator:
    """A CPU generator whose stream depends on the key alone."""
    return torch.Generator().manual_seed(seed_of(*key))


def seed_of(*key: object) -> int:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

"""Measures on an evaluation set: each knows its name, whether higher is better, and its uncertainty."""

import base64
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self, get_type_hints

import torch
from torch import Tensor

from tra.signatures import LONGEST, MOST, check_types, mismatch


@dataclass(frozen=True)
class Evaluation:
    """One named, fixed set of sequences of one length."""

    name: str
    length: int
    """In the task's unit: tokens, or symbols of the string."""
    examples: int | None
    """Sequences; of a text None means all of it."""
    stride: int | None = None
    """Of a text: how far windows move on; by default they lie side by side."""

    def __post_init__(self) -> None:
        check_types(self, " of an evaluation")
        for name, most in (("length", LONGEST), ("examples", MOST), ("stride", MOST)):
            if (value := getattr(self, name)) is not None and value > most:
                raise ValueError(f"{name} must be at most {most:,}, got {value:,}")


class Prediction(NamedTuple):
    """A model's predictions for a batch, for each token but the first: ``[B, L - 1]``, on the CPU."""

    right: Tensor
    """Whether it is the most probable token."""
    loss: Tensor
    """Its negative log-probability, 0 where it does not count."""
    counted: Tensor


@dataclass(frozen=True)
class Result(ABC):
    """What one model scored on one evaluation set. A subclass is a measure."""

    measure: ClassVar[str]
    """The field that says how well a model does."""
    higher_is_better: ClassVar[bool]
    titles: ClassVar[Mapping[str, str]]
    """The fields that tables show, and how they are called there; the measure first."""
    averages: ClassVar[bool]
    """Whether a mean over lengths says something."""

    set: str
    length: int
    examples: int | None
    stride: int | None
    loss: float
    """Mean negative log-probability of the tokens that count."""
    parts: str | None
    """Of each sequence (of a long text, each stretch), what it adds to the score and its weight: see `split`."""

    @property
    def value(self) -> float:
        """The measure itself."""
        return getattr(self, self.measure)

    @property
    def set_label(self) -> str:
        """The set, with the stride of sliding windows."""
        return self.set + (f" (stride {self.stride})" if self.stride else "")

    def measures(self) -> dict[str, float]:
        """Loss, measure and what else there is to follow while training, by name."""
        return {name: getattr(self, name) for name in self.measure_names()}

    @classmethod
    def measure_names(cls) -> tuple[str, ...]:
        """The names of `measures`."""
        return ("loss", *cls.titles)

    @property
    @abstractmethod
    def sequences(self) -> int | None:
        """How many independent sequences were measured, where that is known."""

    @abstractmethod
    def finish(self, ratio: Tensor, field: str) -> Tensor:
        """A field of `titles` from the ratio of the summed scores and weights of the parts."""

    def split(self) -> Tensor | None:
        """``[n, 2]``: of each part its score and its weight; None where an earlier version did not store them."""
        return None if self.parts is None else unpacked(self.parts).view(-1, 2)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, of this version or an earlier one, which stored neither stride nor parts; a ValueError
        if it is something else."""
        known = {field.name for field in fields(cls)}
        found = {"stride": None, "parts": None, **{name: x for name, x in dict(stored).items() if name in known}}
        result = cls(**found)
        hints = get_type_hints(cls)
        for name, value in found.items():
            each = value if isinstance(value, list) else [value]
            for entry, annotation in [(value, hints[name]), *((x, float | None) for x in each if x is not value)]:
                infinite = isinstance(entry, float) and not math.isfinite(entry)  # which a perplexity may be
                if wrong := mismatch(0.0 if infinite else entry, annotation):
                    raise ValueError(f"{name} of a result must be {wrong}")
        Evaluation(result.set, result.length, result.examples, result.stride)  # raises what is wrong
        if (result.examples or 0) < 0:
            raise ValueError(f"examples of a result must be at least 0, got {result.examples}")
        parts = result.split()
        if parts is not None and len(parts):
            score, weight = parts.double().sum(dim=0)
            of_parts = float(result.finish(score / weight, cls.measure))
            if not (math.isnan(of_parts) or math.isclose(of_parts, result.value, rel_tol=1e-3)):
                raise ValueError(
                    f"{cls.measure} of a result must be that of its parts, {of_parts:g}, got {result.value:g}"
                )
        return result


@dataclass(frozen=True)
class ExactMatch(Result):
    """The share of sequences of which every token that counts is the model's most probable one."""

    measure = "exact_match"
    higher_is_better = True
    titles: ClassVar[Mapping[str, str]] = {"exact_match": "exact match"}
    averages = True

    exact_match: float
    token_accuracy: float
    tokens: int | None = None
    """How many tokens had to be predicted; earlier versions did not store it."""

    @classmethod
    def measure_names(cls) -> tuple[str, ...]:
        return (*super().measure_names(), "token_accuracy")

    @classmethod
    def of(cls, evaluation: Evaluation, predictions: Iterable[Prediction]) -> Self:
        matched: list[Tensor] = []
        tokens = correct = 0
        loss = 0.0
        for batch in predictions:
            matched.append((batch.right | ~batch.counted).all(dim=1))
            tokens += int(batch.counted.sum())
            correct += int((batch.right & batch.counted).sum())
            loss += batch.loss.sum(dtype=torch.float64).item()
        matches = torch.cat(matched)
        return cls(
            set=evaluation.name,
            length=evaluation.length,
            examples=len(matches),
            stride=evaluation.stride,
            loss=loss / tokens,
            parts=packed(torch.stack([matches.float(), torch.ones(len(matches))], dim=1)),
            exact_match=int(matches.sum()) / len(matches),
            token_accuracy=correct / tokens,
            tokens=tokens,
        )

    @property
    def sequences(self) -> int | None:
        return self.examples

    def finish(self, ratio: Tensor, field: str) -> Tensor:
        return ratio

    def split(self) -> Tensor | None:
        stored = super().split()
        if stored is None and self.examples:  # the number of matches says as much
            matches = round(self.exact_match * self.examples)
            stored = torch.stack([(torch.arange(self.examples) < matches).float(), torch.ones(self.examples)], dim=1)
        return stored


MOST_STRETCHES = 256
"""Parts of a text: neighbouring windows resemble each other, so long texts are divided into few long stretches."""


@dataclass(frozen=True)
class Perplexity(Result):
    """The perplexity of a text per token, word and byte, and the mean loss by position in the window.

    Positions are gathered between powers of two: entry k is of those from 2^k (from 0 for the first) up to 2^(k+1).
    A perplexity too large for a float, for instance per word of a text without words, is infinite.
    """

    measure = "perplexity"
    higher_is_better = False
    titles: ClassVar[Mapping[str, str]] = {
        "perplexity": "perplexity per token",
        "perplexity_per_word": "perplexity per word",
        "perplexity_per_byte": "perplexity per byte",
    }
    averages = False

    tokens: int
    words: int
    bytes: int
    perplexity: float
    perplexity_per_word: float
    perplexity_per_byte: float
    loss_by_position: list[float | None]
    windows: int | None = None

    @classmethod
    def of(cls, evaluation: Evaluation, predictions: Iterable[Prediction], words: int, size: int) -> Self:
        """``words`` and ``size`` in bytes are those of the text that was predicted."""
        tokens, loss = 0, 0.0
        summed = torch.zeros(64, dtype=torch.float64)
        count = torch.zeros(64, dtype=torch.int64)
        windows: list[Tensor] = []
        for batch in predictions:
            tokens += int(batch.counted.sum())
            loss += batch.loss.sum(dtype=torch.float64).item()
            position = torch.arange(batch.loss.shape[1], dtype=torch.float64).clamp(min=1).log2().floor().long()
            summed.index_add_(0, position, batch.loss.sum(dim=0, dtype=torch.float64))
            count.index_add_(0, position, batch.counted.sum(dim=0))
            windows.append(torch.stack([batch.loss.double().sum(dim=1), batch.counted.double().sum(dim=1)], dim=1))
        used = int(count.nonzero().max()) + 1
        by_window = torch.cat(windows)
        number = min(MOST_STRETCHES, len(by_window))
        stretches = torch.stack([part.sum(dim=0) for part in by_window.tensor_split(number)])
        return cls(
            set=evaluation.name,
            length=evaluation.length,
            examples=evaluation.examples,
            stride=evaluation.stride,
            loss=loss / tokens,
            parts=packed(stretches.float()),
            tokens=tokens,
            words=words,
            bytes=size,
            perplexity=_perplexity(loss, tokens),
            perplexity_per_word=_perplexity(loss, words),
            perplexity_per_byte=_perplexity(loss, size),
            loss_by_position=[
                round(total / number, 6) if number else None
                for total, number in zip(summed[:used].tolist(), count[:used].tolist(), strict=True)
            ],
            windows=len(by_window),
        )

    @property
    def sequences(self) -> int | None:
        return self.windows if self.windows is not None else self.examples

    def finish(self, ratio: Tensor, field: str) -> Tensor:
        number = {"perplexity": self.tokens, "perplexity_per_word": self.words, "perplexity_per_byte": self.bytes}
        return (ratio * (self.tokens / number[field] if number[field] else math.inf)).exp()


def _perplexity(loss: float, number: int) -> float:
    try:
        return math.exp(loss / number)
    except (OverflowError, ZeroDivisionError):
        return math.inf


MOST_PACKED = 1 << 26
"""Bytes: those of eight million sequences."""


def packed(numbers: Tensor) -> str:
    """Numbers as a short text, for JSON: float32, compressed."""
    raw = numbers.flatten().contiguous().view(torch.uint8).tolist() if numbers.numel() else []
    return base64.b64encode(zlib.compress(bytes(raw), 9)).decode("ascii")


def unpacked(text: str) -> Tensor:
    """What `packed` was given, flat."""
    unpacking = zlib.decompressobj()
    try:
        raw = bytearray(unpacking.decompress(base64.b64decode(text), MOST_PACKED))
    except zlib.error as error:
        raise ValueError(f"parts must be numbers as `packed` writes them: {error}") from error
    if len(raw) % 8 or not unpacking.eof:
        raise ValueError(f"parts must be pairs of numbers, of at most {MOST_PACKED:,} bytes")
    return torch.frombuffer(raw, dtype=torch.float32) if raw else torch.empty(0)

"""Records with numbers of one's own choosing."""

from collections.abc import Mapping, Sequence

import torch

from tra.report import Record
from tra.tasks import ExactMatch, Perplexity
from tra.tasks.measures import packed


def matches(
    column: str,
    row: str,
    name: str,
    measured: Mapping[int, Sequence[float]],
    *,
    trained: int = 8,
    examples: int | None = None,
    tuned: bool = True,
    unit: str = "tokens",
) -> list[Record]:
    """Of one mechanism: for each length the exact match of seeds 0, 1, ...; intervals need a number of examples."""
    return [
        Record(
            column, row, seed, trained, unit, ExactMatch(name, length, examples, None, 0.5, None, value, value), tuned
        )
        for length, values in measured.items()
        for seed, value in enumerate(values)
    ]


def perplexities(
    row: str,
    length: int,
    stride: int | None,
    by_seed: Sequence[float],
    name: str = "valid",
    *,
    losses: Sequence[float | None] = (),
    windows: int | None = 7,
    trained: int = 16,
    column: str = "wikitext103",
) -> list[Record]:
    """Of a mechanism in one window, from the perplexity per token of each seed: 3 tokens a word, 2 bytes each."""
    return [
        Record(
            column,
            row,
            seed,
            trained,
            "tokens",
            Perplexity(
                set=name,
                length=length,
                examples=None,
                stride=stride,
                loss=1.0,
                parts=None,
                tokens=600,
                words=200,
                bytes=1200,
                perplexity=value,
                perplexity_per_word=value**3,
                perplexity_per_byte=value**0.5,
                loss_by_position=list(losses),
                windows=windows,
            ),
        )
        for seed, value in enumerate(by_seed)
    ]


def stretches(losses: Sequence[float], tokens: Sequence[int], words: int, size: int) -> Perplexity:
    """Of a text in as many stretches as there are losses, each the sum over its tokens."""
    number, total = sum(tokens), sum(losses)
    per = [float(torch.tensor(total / count).exp()) for count in (number, words, size)]
    parts = packed(torch.tensor([losses, tokens], dtype=torch.float32).T)
    return Perplexity("valid", 16, None, None, total / number, parts, number, words, size, *per, [], len(tokens))


def marked(right: Sequence[bool], length: int = 8) -> ExactMatch:
    """What was right of each sequence."""
    hits = torch.tensor(right, dtype=torch.float32)
    share = float(hits.mean())
    parts = packed(torch.stack([hits, torch.ones(len(hits))], dim=1))
    return ExactMatch("iid", length, len(right), None, 0.5, parts, share, share)

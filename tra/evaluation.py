"""Measuring a model on a task: full-sequence exact match, or the perplexity of text."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from tra.lookup import lookup
from tra.model import Decoder
from tra.progress import progress
from tra.recipes import Evaluation, Recipe
from tra.report import set_of
from tra.tasks import Batch, Task

TOKENS_PER_BATCH = 16_384
LOGITS_PER_BATCH = 1 << 27
TOKENS_PER_PIECE = 512
"""Long sequences are read piece by piece through the cache, so that memory stays linear in the length."""
SCORES_PER_PIECE = 1 << 20
"""Of one head, over the batch. Full batches of such sequences have pieces of 64 tokens: mechanisms that hold all scores
run several times faster while those of a piece fit the processor's cache."""


def evaluate_all(
    model: Decoder, recipe: Recipe, evaluations: Sequence[Evaluation], console: Console
) -> list[dict[str, Any]]:
    """Measure a model on several sets, printing a line for each length as it is done."""
    task = recipe.build_task(console)
    for evaluation in evaluations:
        lookup(task.evaluation_sets(), evaluation.name, "evaluation set")
        if task.measure == "perplexity":  # its tokens are made here, with a progress of their own
            next(task.evaluation_batches(evaluation.name, evaluation.length, evaluation.examples, 1, evaluation.stride))
    results: list[dict[str, Any]] = []
    shown = 0
    attention = recipe.model.attention
    with progress(console, f"evaluating {attention}", len(evaluations), "set") as update:
        for done, evaluation in enumerate(evaluations, 1):
            results.append(evaluate(model, task, evaluation))
            update(done, **{task.measure: results[-1][task.measure]})
            if done == len(evaluations) or evaluations[done].length != evaluation.length:
                cells = "  ".join(f"{set_of(result)} {result[task.measure]:.3f}" for result in results[shown:])
                shown = done
                console.print(f"{attention:>6} at {evaluation.length:>6,} {task.unit}:  {cells}", highlight=False)
    return results


def evaluate_published(model: Decoder, task: Task, names: Sequence[str], folder: Path | None) -> list[dict[str, Any]]:
    """Measure a model on splits of the copy that the task's authors published."""
    results = []
    for name in names:
        whole = task.published(name, folder)
        length = whole.tokens.shape[1]
        size = max(1, TOKENS_PER_BATCH // length)
        batches = (whole[start : start + size] for start in range(0, len(whole), size))
        results.append({"set": name, "length": length, "examples": len(whole), **score(model, batches)})
    return results


def evaluate(model: Decoder, task: Task, evaluation: Evaluation) -> dict[str, Any]:
    """Measure a model on one named set.

    A sequence matches when every token that counts is the model's most probable one.
    """
    name, length, examples = evaluation.name, evaluation.length, evaluation.examples
    tokens = min(TOKENS_PER_BATCH, LOGITS_PER_BATCH // model.config.vocabulary)
    batches = task.evaluation_batches(name, length, examples, max(1, tokens // max(1, length)), evaluation.stride)
    about = {"set": name, "length": length, "examples": examples}
    if task.measure == "perplexity":
        extent = task.extent(name, length, examples)
        return {**about, "stride": evaluation.stride, **perplexity(model, batches, *extent)}
    return {**about, **score(model, batches)}


def score(model: Decoder, batches: Iterable[Batch]) -> dict[str, float]:
    """Exact match over sequences, accuracy and loss over tokens that count."""
    sequences = matches = tokens = correct = 0
    loss = 0.0
    for reading in read(model, batches):
        sequences += len(reading.right)
        matches += int((reading.right | ~reading.counted).all(dim=1).sum())
        tokens += int(reading.counted.sum())
        correct += int((reading.right & reading.counted).sum())
        loss += reading.loss.sum(dtype=torch.float64).item()
    return {"exact_match": matches / sequences, "token_accuracy": correct / tokens, "loss": loss / tokens}


def perplexity(model: Decoder, batches: Iterable[Batch], words: int, size: int) -> dict[str, Any]:
    """Perplexity per token, word and byte of a text, and the mean loss by position in the window.

    Positions are gathered between powers of two: entry k is of those from 2^k (from 0 for the first) up to 2^(k+1).
    What is too large for a number, as where a text has no words, is infinite.
    """
    tokens, loss = 0, 0.0
    summed = torch.zeros(64, dtype=torch.float64)
    count = torch.zeros(64, dtype=torch.int64)
    for reading in read(model, batches):
        tokens += int(reading.counted.sum())
        loss += reading.loss.sum(dtype=torch.float64).item()
        place = torch.arange(reading.loss.shape[1], dtype=torch.float64).clamp(min=1).log2().floor().long()
        summed.index_add_(0, place, reading.loss.sum(dim=0, dtype=torch.float64))
        count.index_add_(0, place, reading.counted.sum(dim=0))
    used = int(count.nonzero().max()) + 1
    return {
        "tokens": tokens,
        "words": words,
        "bytes": size,
        "loss": loss / tokens,
        "perplexity": _perplexity(loss, tokens),
        "perplexity_per_word": _perplexity(loss, words),
        "perplexity_per_byte": _perplexity(loss, size),
        "loss_by_position": [
            round(total / number, 6) if number else None
            for total, number in zip(summed[:used].tolist(), count[:used].tolist(), strict=True)
        ],
    }


def _perplexity(loss: float, number: int) -> float:
    try:
        return math.exp(loss / number)
    except (OverflowError, ZeroDivisionError):
        return math.inf


class Reading(NamedTuple):
    """What a model makes of a batch, for each token but the first: ``[B, L - 1]``, on the CPU."""

    right: Tensor
    """Whether it is the most probable one."""
    loss: Tensor
    """Its negative log-probability, 0 where it does not count."""
    counted: Tensor


@torch.inference_mode()
def read(model: Decoder, batches: Iterable[Batch]) -> Iterator[Reading]:
    """Read batches in evaluation mode."""
    device = model.head.weight.device
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            yield _read(model, batch.to(device))
    finally:
        model.train(was_training)


def _read(model: Decoder, batch: Batch) -> Reading:
    inputs, targets, counted = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.counted[:, 1:]
    cache, size = None, TOKENS_PER_PIECE
    if inputs.shape[1] > TOKENS_PER_PIECE:
        cache, size = model.new_cache(), min(TOKENS_PER_PIECE, max(64, SCORES_PER_PIECE // inputs.numel()))
    right, loss = [], []
    for piece, target in zip(*(x.split(size, dim=1) for x in (inputs, targets)), strict=True):
        logits = model(piece, cache=cache).float()
        right.append(logits.argmax(dim=-1) == target)
        loss.append(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target))
    lost = torch.cat(loss, dim=1).masked_fill(~counted, 0.0)
    # To the CPU, for sums in float64, which some devices have not.
    return Reading(torch.cat(right, dim=1).cpu(), lost.cpu(), counted.cpu())

"""Measuring a model on a task: full-sequence exact match."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from tra.lookup import lookup
from tra.model import Decoder
from tra.progress import progress
from tra.recipes import Evaluation, Recipe
from tra.tasks import Batch, Task

TOKENS_PER_BATCH = 16_384
TOKENS_PER_PIECE = 512
"""Long sequences are read piece by piece through the cache, so that memory stays linear in the length."""


def evaluate_all(
    model: Decoder, recipe: Recipe, evaluations: Sequence[Evaluation], console: Console
) -> list[dict[str, Any]]:
    """Measure a model on several sets, printing a line for each length as it is done."""
    task = recipe.build_task()
    for name in {evaluation.name for evaluation in evaluations}:
        lookup(task.evaluation_sets(), name, "evaluation set")
    results: list[dict[str, Any]] = []
    attention = recipe.model.attention
    with progress(console, f"evaluating {attention}", len(evaluations), "set") as update:
        for done, evaluation in enumerate(evaluations, 1):
            results.append(evaluate(model, task, evaluation))
            update(done, exact_match=results[-1]["exact_match"])
            if done == len(evaluations) or evaluations[done].length != evaluation.length:
                row = [result for result in results if result["length"] == evaluation.length]
                cells = "  ".join(f"{result['set']} {result['exact_match']:.3f}" for result in row)
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
    batch = max(1, TOKENS_PER_BATCH // evaluation.length)
    batches = task.evaluation_batches(evaluation.name, evaluation.length, evaluation.examples, batch)
    return {
        "set": evaluation.name,
        "length": evaluation.length,
        "examples": evaluation.examples,
        **score(model, batches),
    }


@torch.inference_mode()
def score(model: Decoder, batches: Iterable[Batch]) -> dict[str, float]:
    """Exact match over sequences, accuracy and loss over tokens that count."""
    device = model.head.weight.device
    was_training = model.training
    model.eval()
    sequences = matches = tokens = correct = 0
    loss = 0.0
    for batch in batches:
        batch = batch.to(device)
        right, batch_loss = _read(model, batch)
        counted = batch.counted[:, 1:]
        sequences += len(batch)
        matches += int((right | ~counted).all(dim=1).sum())
        tokens += int(counted.sum())
        correct += int((right & counted).sum())
        loss += batch_loss
    model.train(was_training)
    return {"exact_match": matches / sequences, "token_accuracy": correct / tokens, "loss": loss / tokens}


def _read(model: Decoder, batch: Batch) -> tuple[Tensor, float]:
    """Whether each token after the first is predicted, and the summed loss of those that count."""
    inputs, targets, counted = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.counted[:, 1:]
    cache = model.new_cache() if inputs.shape[1] > TOKENS_PER_PIECE else None
    right, loss = [], 0.0
    for piece, target, counts in zip(
        *(x.split(TOKENS_PER_PIECE, dim=1) for x in (inputs, targets, counted)), strict=True
    ):
        logits = model(piece, cache=cache).float()
        right.append(logits.argmax(dim=-1) == target)
        loss += F.cross_entropy(logits[counts], target[counts], reduction="sum").item()
    return torch.cat(right, dim=1), loss

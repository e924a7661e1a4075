"""The batch of each training step, as a function of the step's number alone."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tra.recipes import Recipe
from tra.tasks import Batch, Task
from tra.tasks.base import seeded

BLOCK = 1024
"""Sequences of fixed data that one generator gives."""


def training_batches(recipe: Recipe, task: Task) -> Callable[[int], Batch]:
    """A function from a step to its batch."""
    if recipe.data == "fresh":
        return lambda step: task.sample(seeded("train", recipe.seed, step), recipe.batch, recipe.length)
    if recipe.data == "fixed":
        assert recipe.examples is not None
        whole = _fixed_data(recipe, task, recipe.examples)
    else:
        whole = task.published("train", None if recipe.data == "hub" else Path(recipe.data))
        if whole.tokens.shape[1] != recipe.length:
            raise ValueError(f"length must be that of the data, {whole.tokens.shape[1]}, got {recipe.length}")
        if len(whole) < recipe.batch:
            raise ValueError(f"batch must be at most the {len(whole)} sequences of the data, got {recipe.batch}")
    per_pass = len(whole) // recipe.batch
    order: dict[int, Tensor] = {}

    def batch_of_step(step: int) -> Batch:
        this_pass, position = divmod(step, per_pass)
        if this_pass not in order:
            order.clear()
            order[this_pass] = torch.randperm(len(whole), generator=seeded("order", recipe.seed, this_pass))
        return whole[order[this_pass][position * recipe.batch : (position + 1) * recipe.batch]]

    return batch_of_step


def _fixed_data(recipe: Recipe, task: Task, examples: int) -> Batch:
    """Made block by block, and held in bytes where the vocabulary allows."""
    dtype = torch.uint8 if task.vocabulary <= 256 else torch.int32
    width = task.sample(torch.Generator(), 1, recipe.length).tokens.shape[1]
    tokens = torch.empty(examples, width, dtype=dtype)
    counted = torch.empty(examples, width, dtype=torch.bool)
    for start in range(0, examples, BLOCK):
        block = task.sample(seeded("fixed", recipe.seed, start), min(BLOCK, examples - start), recipe.length)
        tokens[start : start + BLOCK] = block.tokens
        counted[start : start + BLOCK] = block.counted
    return Batch(tokens, counted)

"""What long context is used for: an adopted model finds a key in noise beyond the length that it was trained at.

    tra reproduce benchmarks/healing_keys.py --output WORK [--scale small] [--seeds 3] [--columns 0 200]

A Llama of the size of `benchmarks/healing.py` learns the task passkey with RoPE: a key of three digits stands anywhere
among noise and is asked for at the end. The settings of that file change it, and it is trained for some more steps.
Nothing longer than 128 tokens is ever trained on; measured is how many of the three digits are right in longer texts.
Every measurement is added to WORK/keys.json, and what is there already is not done again.
"""

from functools import partial
from typing import Any

import torch
from healing import (
    SETTINGS,
    WINDOW,
    Batches,
    Healing,
    Results,
    adopt,
    base_model,
    groups,
    interval,
    rows_of,
    shrunk,
)
from torch import Tensor

from tra.experiments import Outcome
from tra.recipes import Evaluation, Recipe
from tra.report.tables import Table

OWN = {
    "TRA, threshold 0": partial(adopt, threshold=0.0),
    "TRA, threshold 0, positions dropped": partial(adopt, threshold=0.0, drop_positions=True),
}
"""What may forget less than the defaults."""
SHORTEST = 16
LENGTHS = {128: 256, 512: 128, 1024: 64, 4096: 32}
"""How many texts are read at each length."""
AT_ONCE = 16384
"""Tokens."""


def keys_model(attention: str = "rope") -> Recipe:
    """The model that is changed; the passkey task has 112 symbols."""
    return base_model().changed(
        {
            "task": "passkey",
            "task_options": {},
            "model.vocabulary": 112,
            "steps": 1000,
            "batch": 16,
            "evaluations": tuple(Evaluation("passkey", length, number) for length, number in LENGTHS.items()),
        }
    )


def key_batches(recipe: Recipe) -> Batches:
    """Texts of one length up to a training window; only the key at the end is labelled."""
    task = recipe.build_task()

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        length = int(torch.randint(SHORTEST, WINDOW + 1, (), generator=generator))
        batch = task.sample(generator, recipe.batch, length)
        return batch.tokens, batch.tokens.masked_fill(~batch.counted, -100)

    return draw


@torch.no_grad()
def accuracy(model: Any, recipe: Recipe, evaluation: Evaluation) -> float:
    """The share of digits that are the most probable token."""
    right = []
    for batch in recipe.build_task().evaluation_batches(evaluation, AT_ONCE // evaluation.length):
        tokens, counted = batch.tokens.long(), batch.counted[:, 1:]
        found = model(tokens, use_cache=False).logits[:, :-1].argmax(-1)
        right.append((found == tokens[:, 1:])[counted])
    return torch.cat(right).float().mean().item()


def measure_keys(model: Any, recipe: Recipe) -> dict[str, Any]:
    return {"accuracy": {str(entry.length): accuracy(model, recipe, entry) for entry in recipe.evaluations}}


def table(results: Results) -> Table:
    """The percentage of digits that are right, means over seeds with 95% intervals."""
    lengths = sorted(results[0]["accuracy"], key=int)
    rows = []
    for name, steps, some in groups(results):
        cells = [interval("accuracy", [row["accuracy"][key] for row in some]) for key in lengths]
        rows.append([name, f"{steps:,}", *cells, str(len(some))])
    return Table(["setting", "steps", *(f"{int(key):,}" for key in lengths), "seeds"], rows)


def key_tables(outcome: Outcome) -> list[Table]:
    return [table(outcome.content["results"])]


experiment = Healing(
    scales={
        "smoke": dict.fromkeys(("0", "2"), shrunk(keys_model)),
        "small": dict.fromkeys(("0", "200"), keys_model),
    },
    rows=rows_of([*SETTINGS, *OWN]),
    seeds=3,
    at_scale={"smoke": {"seeds": 1}},
    tables=key_tables,
    stem="keys",
    changes={**SETTINGS, **OWN},
    batches=key_batches,
    measure=measure_keys,
)

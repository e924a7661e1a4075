"""What an experiment would take: its runs, parameters and tokens, and the time, estimated from a few measured steps."""

import math
import time
from functools import lru_cache

import torch

from tra.bench.workloads import training_step
from tra.environment import best_device
from tra.experiments.cells import Cell
from tra.experiments.experiment import Experiment
from tra.experiments.grid import part_of
from tra.experiments.perform import wanted_runs
from tra.experiments.request import Request
from tra.model import Decoder, DecoderConfig
from tra.progress import progress
from tra.recipes import Recipe
from tra.report.tables import Table

TOKENS = 1024
"""Of a measured step, about: the time of larger ones is taken to be in proportion."""
STEPS = 2
FORWARD_SHARE = 1 / 3
"""Of a training step's time per token, what measuring takes."""
PAPERS_RATE = (2_637_072, 20_000 * 64 * 256 / (65.88 * 60)), (72_492_096, 20_000 * 64 * 256 / (178.19 * 60))
"""Parameters and tokens per second of the paper's two TRA models on one A40, in windows of 256 at batch 64."""


def plan(experiment: Experiment, request: Request) -> Table:
    """A row for each column and mechanism: number of runs, parameters, tokens, and hours on this machine."""
    search, reported, joined = wanted_runs(experiment, request)
    tries, mine = (part_of(some, *request.shard) for some in (search.expected, reported))
    left = [*tries, *(cell for cell in mine if cell.key not in joined.records)]
    cells = [cell for cell in left if cell.results() is None]
    groups: dict[tuple[str, str, bool], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.column, cell.row, bool(cell.choice)), []).append(cell)
    body, total, on_gpu = [], 0.0, 0.0
    speeds: dict[tuple[DecoderConfig, int], float] = {}
    with progress("measuring a few steps of each", len(groups), "kind") as update:
        for done, ((column, row, tunes), some) in enumerate(groups.items(), 1):
            hours = sum(_seconds(cell.recipe, speeds) for cell in some) / 3600
            gpu_hours = sum(a40_seconds(cell.recipe) for cell in some) / 3600
            total, on_gpu = total + hours, on_gpu + gpu_hours
            recipe = some[0].recipe
            body.append(
                [
                    f"{column} (tuning)" if tunes else column,
                    row,
                    str(len(some)),
                    f"{parameters(recipe.model):,}",
                    f"{training_tokens(recipe):,}",
                    f"{evaluation_tokens(recipe):,}",
                    _rough(hours),
                    _rough(gpu_hours),
                ]
            )
            update(done)
    body.append(["all", "", str(len(cells)), "", "", "", _rough(total), _rough(on_gpu)])
    headings = (
        *("column", "attention", "runs", "parameters", "tokens trained", "tokens measured"),
        *("hours, estimated", "A40 hours"),
    )
    device = best_device()
    note = (
        f"Runs that are not finished yet. Tokens are of one run, hours of all in the line, one after another on this "
        f"machine ({device}): a rough estimate from the best of {STEPS} steps of about {TOKENS:,} tokens. Measuring is "
        "taken to cost a third of training, and texts that are measured whole are not counted. A40 hours follow from "
        "the paper's times of TRA on one such GPU, whatever the mechanism: nothing here was run on a GPU. Where "
        "tuning cannot tell two choices apart, both are reported, which takes up to twice the reported runs."
    )
    return Table(headings, body, f"Runs at the scale {search.grid.scale}", note, words=2)


def _rough(hours: float) -> str:
    """Two digits, or whole hours: an estimate holds no more."""
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


@lru_cache
def parameters(config: DecoderConfig) -> int:
    """Of a model, without making it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def training_tokens(recipe: Recipe) -> int:
    return recipe.steps * recipe.batch * recipe.build_task().tokens_in(recipe.length)


def evaluation_tokens(recipe: Recipe) -> int:
    """Of the evaluations whose number of sequences is known."""
    task = recipe.build_task()
    return sum((entry.examples or 0) * task.tokens_in(entry.length) for entry in recipe.evaluations)


def _seconds(recipe: Recipe, speeds: dict[tuple[DecoderConfig, int], float]) -> float:
    tokens = recipe.build_task().tokens_in(recipe.length)
    key = recipe.model, tokens
    if key not in speeds:
        speeds[key] = tokens_per_second(recipe, tokens)
    return (training_tokens(recipe) + FORWARD_SHARE * evaluation_tokens(recipe)) / speeds[key]


def a40_seconds(recipe: Recipe) -> float:
    """By the rates of the paper's two models, and between and beyond them in proportion on logarithmic scales."""
    (small, fast), (large, slow) = PAPERS_RATE
    share = math.log(parameters(recipe.model) / small) / math.log(large / small)
    rate = fast * (slow / fast) ** max(0.0, share)
    return (training_tokens(recipe) + FORWARD_SHARE * evaluation_tokens(recipe)) / rate


def tokens_per_second(recipe: Recipe, tokens: int) -> float:
    """Of training steps on random tokens."""
    rows = min(recipe.batch, max(1, TOKENS // tokens))
    with torch.random.fork_rng():
        step = training_step(recipe.model, rows, tokens, best_device().type, recipe.precision)
        times = []
        for _ in range(STEPS + 1):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    return rows * tokens / min(times[1:])  # the first allocates


__all__ = ["plan"]

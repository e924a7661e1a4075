"""`tra reproduce`: the runs behind a table or figure, and the table or figure from what they stored."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from tra.attention import MECHANISMS
from tra.errors import RunError
from tra.figures import accuracy_by_length, attention_heatmap
from tra.files import write_whole
from tra.grid import Cell, run_all
from tra.lookup import lookup
from tra.recipes import Recipe, figure1, table1, tuning
from tra.report import comparison_csv, comparison_tables, environment, records, spread, write_json
from tra.runs import load_model
from tra.tasks.base import seeded

HEATMAP_TOKENS = 32
MEASUREMENT = ("command", "trained_here", "seconds", "environment")


@dataclass(frozen=True)
class Reproduction:
    """A table or figure: where its recipes are, which mechanisms it compares, and how it is made from their runs."""

    recipes: ModuleType
    """Has a function for each scale, which returns a recipe per column."""
    attention: tuple[str, ...]
    draw: Callable[[Sequence[Cell], Path], None]


def reproduce(
    name: str,
    folder: Path,
    *,
    scale: str,
    seeds: int,
    attention: Sequence[str],
    jobs: int,
    shard: tuple[int, int],
    train: bool,
    console: Console,
    command: str,
) -> list[Cell]:
    """Run what is missing (of this shard), then write the table or figure from all that is stored in the folder."""
    started = time.monotonic()
    reproduction = REPRODUCTIONS[name]
    cells = cells_of(reproduction, folder, scale, seeds, attention or reproduction.attention)
    folder.mkdir(parents=True, exist_ok=True)
    index, count = shard
    mine = cells[index - 1 :: count]
    before = sum(cell.results() is not None for cell in mine)
    if train:
        run_all(mine, jobs, console)
    finished = [cell for cell in cells if cell.results() is not None]
    if not finished:
        reasons = {cell.failure() for cell in cells} - {None}
        raise RunError(f"no run in {folder} is finished" + (f": {reasons.pop()}" if reasons else ""))
    content = {
        "command": command,
        "runs": len(cells),
        "finished": len(finished),
        "trained_here": sum(cell.results() is not None for cell in mine) - before,
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment(),
        "failures": {cell.label: cell.failure() for cell in cells if cell.failure() is not None},
        "recipes": {cell.column: asdict(cell.recipe) for cell in reversed(cells)},
        "learning_rates": {cell.recipe.model.attention: cell.recipe.learning_rate for cell in cells},
        "results": all_records(finished),
    }
    if content["trained_here"] == 0:
        # Made again from what is stored: where and how it was measured stays as it was.
        content |= {key: value for key, value in _stored(folder).items() if key in MEASUREMENT}
    reproduction.draw(finished, folder)
    write_json(folder / "results.json", content)
    return cells


def _stored(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "results.json").read_text())
    except (OSError, ValueError):
        return {}


def cells_of(reproduction: Reproduction, folder: Path, scale: str, seeds: int, attention: Sequence[str]) -> list[Cell]:
    """All runs, a whole table for one seed before the next seed, so that a part of them says something."""
    columns: dict[str, Recipe] = getattr(reproduction.recipes, lookup(SCALES, scale, "scale"))()
    for entry in attention:
        lookup(MECHANISMS, entry, "attention")
    tuned = table1.LEARNING_RATES if scale == "small" and reproduction.recipes is table1 else {}
    cells = []
    for seed in range(seeds):
        for column, recipe in columns.items():
            for entry in attention:
                rate = tuned.get(entry, recipe.learning_rate)
                whole = replace(recipe, seed=seed, learning_rate=rate, model=replace(recipe.model, attention=entry))
                cells.append(Cell(column, whole, folder / "runs" / column / entry / str(seed)))
    return cells


def all_records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        row
        for cell in cells
        for row in records(cell.column, cell.recipe.model.attention, cell.recipe.seed, cell.results() or [])
    ]


def draw_table(cells: Sequence[Cell], folder: Path) -> None:
    """`table.md`, `table.csv` and a figure of accuracy against length for each column."""
    rows = all_records(cells)
    recipes = {cell.column: cell.recipe for cell in cells}
    write_whole(folder / "table.md", comparison_tables(rows, {name: recipe.length for name, recipe in recipes.items()}))
    write_whole(folder / "table.csv", comparison_csv(rows))
    for column, recipe in recipes.items():
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["column"] == column:
                lines.setdefault(row["attention"], []).append(row)
        unit = recipe.build_task().unit
        accuracy_by_length(lines, recipe.length, folder / f"accuracy-{column}.png", unit, column)


def draw_tuning(cells: Sequence[Cell], folder: Path) -> None:
    """`table.md`: each mechanism's loss at the training length for each learning rate, the lowest marked."""
    trained = {cell.column: cell.recipe.length for cell in cells}
    losses = tuning_losses(all_records(cells), trained)
    best = best_rates(losses)
    rates = list(dict.fromkeys(rate for by_rate in losses.values() for rate in by_rate))
    lines = [f"| attention | {' | '.join(rates)} |", "|---|" + "---:|" * len(rates)]
    for attention, by_rate in losses.items():
        shown = (f"{by_rate[rate]:.4f}" if rate in by_rate else "" for rate in rates)
        marked = (f"**{text}**" if rate == best[attention] else text for rate, text in zip(rates, shown, strict=True))
        lines.append(f"| {attention} | {' | '.join(marked)} |")
    write_whole(folder / "table.md", "\n".join(lines) + "\n")


def tuning_losses(rows: Sequence[dict[str, Any]], trained: dict[str, int]) -> dict[str, dict[str, float]]:
    """Mean loss over seeds at the training length, by mechanism and learning rate."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["length"] == trained[row["column"]]:
            found.setdefault(row["attention"], {}).setdefault(row["column"], []).append(row["loss"])
    return {name: {rate: spread(values)[0] for rate, values in rates.items()} for name, rates in found.items()}


def best_rates(losses: dict[str, dict[str, float]]) -> dict[str, str]:
    """The learning rate with the lowest loss: chosen within the training length, never by what lies past it."""
    return {attention: min(by_rate, key=by_rate.__getitem__) for attention, by_rate in losses.items()}


@torch.inference_mode()
def draw_attention(cells: Sequence[Cell], folder: Path) -> None:
    """`attention.png`: every mechanism's weights on one sequence, from the first seed."""
    weights, symbols = {}, []
    for cell in cells:
        if cell.recipe.seed == 0:
            model, _ = load_model(cell.folder)
            task = cell.recipe.build_task()
            tokens = task.sample(seeded("heatmap", 0), 1, HEATMAP_TOKENS).tokens
            symbols = [task.symbols[token] for token in tokens[0].tolist()]
            on_device = tokens.to(model.head.weight.device)
            weights[cell.recipe.model.attention] = [layer[0] for layer in model.attention_weights(on_device)]
    attention_heatmap(weights, symbols, folder / "attention.png")


SCALES = {"paper": "paper", "small": "small", "smoke": "smoke"}

REPRODUCTIONS: dict[str, Reproduction] = {
    "table1": Reproduction(table1, tuple(MECHANISMS), draw_table),
    "tuning": Reproduction(tuning, tuple(MECHANISMS), draw_tuning),
    "figure1": Reproduction(figure1, ("tra", "fot"), draw_attention),
}

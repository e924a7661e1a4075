"""`tra reproduce`: the runs behind a table or figure, and the table or figure from what they stored."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console

from tra.attention import MECHANISMS
from tra.errors import RunError
from tra.figures import accuracy_by_length, attention_heatmap, perplexity_by_window
from tra.files import write_whole
from tra.grid import Cell, run_all
from tra.inspection import write_inspection
from tra.lookup import lookup
from tra.recipes import Recipe, figure1, figure2, table1, tuning
from tra.report import (
    Result,
    comparison_csv,
    comparison_tables,
    environment,
    perplexity_tables,
    spread,
    write_json,
)
from tra.runs import load_model, load_task

HEATMAP_TOKENS = 32
FIGURE3_TEXT = (
    "The river rises in the northern hills and flows south through the old town . "
    "In the spring of 1847 the river flooded the town , and the people moved to the northern hills ."
)
SCALES = ("paper", "small", "smoke")

Measured = Mapping[Cell, Sequence[Result]]
"""The finished runs and their results."""


@dataclass(frozen=True)
class Reproduction:
    """A table or figure: where its recipes are, what it compares, and how it is made from the runs."""

    recipes: ModuleType
    """Has a function for each scale, which returns a recipe per column."""
    attention: tuple[str, ...]
    seeds: int
    """As many as it needs, unless asked for others."""
    draw: Callable[[Measured, Path], None]
    small_rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates tuned for a mechanism, at the small scale."""
    results: str = "results.json"
    """The file with everything that was measured."""
    table: str = "table.md"
    """The file to show at the end."""


def reproduce(
    name: str,
    folder: Path,
    *,
    scale: str,
    seeds: int | None,
    attention: Sequence[str],
    jobs: int,
    shard: tuple[int, int],
    train: bool,
    console: Console,
    command: str,
) -> list[Cell]:
    """Run what is missing of this shard, then write the table or figure from those of the runs that are finished."""
    started = time.monotonic()
    reproduction = REPRODUCTIONS[name]
    cells = cells_of(
        reproduction, folder, scale, seeds or reproduction.seeds, tuple(attention) or reproduction.attention
    )
    mine = part_of(cells, *shard)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in mine if cell.results() is None]
    if train:
        run_all(mine, jobs, console)
    with FileLock(folder / ".lock"):  # one machine at a time, and each sees what the one before it saw
        finished = {cell: results for cell in cells if (results := cell.results()) is not None}
        failures = {cell.label: cell.failure() for cell in cells if cell not in finished and cell.failure() is not None}
        if not finished:
            reason = next(iter(failures.values()), "")
            raise RunError(f"no run in {folder} is finished" + (f": {reason}" if reason else ""))
        trained = sum(cell in finished for cell in missing)
        session = {
            "command": command,
            "trained": trained,
            "seconds": round(time.monotonic() - started, 1),
            "environment": environment(),
        }
        content = {
            "runs": len(cells),
            "finished": len(finished),
            "failures": failures,
            "sessions": _sessions(folder / reproduction.results) + ([session] if trained else []),
            "recipes": {cell.column: asdict(cell.recipe) for cell in reversed(cells)},
            "results": all_records(finished),
        }
        reproduction.draw(finished, folder)
        write_json(folder / reproduction.results, content)
    return cells


def _sessions(results: Path) -> list[dict[str, Any]]:
    """What was measured before, and where."""
    try:
        return json.loads(results.read_text())["sessions"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def part_of(cells: Sequence[Cell], index: int, count: int) -> list[Cell]:
    """The index-th of count parts, none of which holds all runs of a mechanism."""
    if count > len(cells):
        raise ValueError(f"shard must be one of at most {len(cells)}, the number of runs, got {index}/{count}")
    width = len({cell.recipe.model.attention for cell in cells})
    shift = 1 if width % count == 0 else 0  # else every row would begin with the same part
    return [cell for place, cell in enumerate(cells) if (place + shift * (place // width)) % count == index - 1]


def cells_of(reproduction: Reproduction, folder: Path, scale: str, seeds: int, attention: Sequence[str]) -> list[Cell]:
    """All runs, a whole table for one seed before the next seed, so that a part of them says something."""
    lookup(dict.fromkeys(SCALES), scale, "scale")
    columns: dict[str, Recipe] = getattr(reproduction.recipes, scale)()
    for entry in attention:
        lookup(MECHANISMS, entry, "attention")
    tuned = reproduction.small_rates if scale == "small" else {}
    cells = []
    for seed in range(seeds):
        for column, recipe in columns.items():
            for entry in attention:
                rate = tuned.get(entry, recipe.learning_rate)
                whole = replace(recipe, seed=seed, learning_rate=rate, model=replace(recipe.model, attention=entry))
                cells.append(Cell(column, whole, folder / "runs" / column / entry / str(seed)))
    return cells


def all_records(measured: Measured) -> list[dict[str, Any]]:
    """A row for everything measured, which says where it belongs."""
    return [
        {
            "column": cell.column,
            "attention": cell.recipe.model.attention,
            "seed": cell.recipe.seed,
            "learning_rate": cell.recipe.learning_rate,
            **result,
        }
        for cell, results in measured.items()
        for result in results
    ]


def draw_table(measured: Measured, folder: Path) -> None:
    """`table.md`, `table.csv` and a figure of accuracy against length for each column."""
    rows = all_records(measured)
    recipes = {cell.column: cell.recipe for cell in measured}
    write_whole(folder / "table.md", comparison_tables(rows, {name: recipe.length for name, recipe in recipes.items()}))
    write_whole(folder / "table.csv", comparison_csv(rows))
    for column, recipe in recipes.items():
        lines = _by_attention([row for row in rows if row["column"] == column])
        unit = recipe.build_task().unit
        accuracy_by_length(lines, recipe.length, folder / f"accuracy-{column}.png", unit, column)


def _by_attention(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(row["attention"], []).append(row)
    return lines


def draw_tuning(measured: Measured, folder: Path) -> None:
    """`table.md`: each mechanism's loss at the training length for each learning rate, the lowest marked."""
    losses = tuning_losses(all_records(measured), {cell.column: cell.recipe.length for cell in measured})
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
def draw_attention(measured: Measured, folder: Path) -> None:
    """`attention.png`: the weights of each mechanism's first finished run, all on one sequence."""
    weights: dict[str, list[torch.Tensor]] = {}
    symbols: list[str] = []
    for cell in measured:
        if cell.recipe.model.attention not in weights:
            model, _ = load_model(cell.folder)
            tokens, symbols = cell.recipe.build_task().example(HEATMAP_TOKENS)
            on_device = tokens[None].to(model.head.weight.device)
            weights[cell.recipe.model.attention] = [layer[0] for layer in model.attention_weights(on_device)]
    attention_heatmap(weights, symbols, folder / "attention.png")


def draw_perplexity(measured: Measured, folder: Path) -> None:
    """`table.md`, `table.csv` and a figure: perplexity against window and loss against position."""
    rows = all_records(measured)
    write_whole(folder / "table.md", perplexity_tables(rows))
    write_whole(folder / "table.csv", comparison_csv(rows, "perplexity"))
    trained = next(iter(measured)).recipe.length
    perplexity_by_window(_by_attention(rows), trained, folder / "perplexity.png")


def draw_inspection(measured: Measured, folder: Path) -> None:
    """`attention.png`, `heads.md` and `heads.json` of the first finished run, on the same sentences as always."""
    cell = next(iter(measured))
    model, _ = load_model(cell.folder)
    tokens, symbols = load_task(cell.folder).read(FIGURE3_TEXT)
    write_inspection(model, tokens, symbols, folder)


REPRODUCTIONS: dict[str, Reproduction] = {
    "table1": Reproduction(table1, tuple(MECHANISMS), 3, draw_table, table1.LEARNING_RATES),
    "tuning": Reproduction(tuning, tuple(MECHANISMS), 1, draw_tuning),
    "figure1": Reproduction(figure1, ("tra", "fot"), 1, draw_attention, table1.LEARNING_RATES),
    "figure2": Reproduction(figure2, ("tra", "rope", "nope", "alibi", "fot", "cope"), 2, draw_perplexity),
    # In the folder of figure 2 it finds its run there.
    "figure3": Reproduction(figure2, ("tra",), 1, draw_inspection, results="figure3.json", table="heads.md"),
}

"""The demonstration: TRA and RoPE learn to remember one bit over 64 tokens, and are asked at up to 64 times that."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tra.evaluation import evaluate_all
from tra.figures import accuracy_by_length, attention_heatmap
from tra.files import write_whole
from tra.model import Decoder
from tra.recipes import RECIPES, Recipe
from tra.report import environment, exact_match_table, write_json
from tra.runs import store_results
from tra.tasks.base import seeded
from tra.training import train

HEATMAP_TOKENS = 48


def demonstrate(folder: Path, seed: int, attentions: tuple[str, ...], console: Console) -> dict[str, Any]:
    """Train, evaluate, print a table as it goes, and write results, table and figures to the folder."""
    started = time.monotonic()
    base = RECIPES["flip-flop-small"]()
    results: dict[str, list[dict[str, Any]]] = {}
    runs: dict[str, dict[str, Any]] = {}
    console.print(f"Training at {base.length} tokens, then exact match at longer lengths.")
    for attention in attentions:
        recipe = replace(base, seed=seed, model=replace(base.model, attention=attention))
        training_started = time.monotonic()
        model = train(recipe, folder / attention, console=console)
        seconds = time.monotonic() - training_started
        results[attention] = evaluate_all(model, recipe, recipe.evaluations, console)
        runs[attention] = {"train_seconds": round(seconds, 1), "results": results[attention]}
        store_results(folder / attention, recipe, recipe.steps, results[attention])
        if attention == "tra":
            _draw_attention(model, recipe, folder / "attention.png")
    table = exact_match_table(results)
    content = {
        "command": f"tra demo --seed {seed} --attention {' '.join(attentions)}",
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment(),
        "runs": runs,
    }
    write_whole(folder / "table.md", table)
    accuracy_by_length(results, base.length, folder / "accuracy.png")
    write_json(folder / "results.json", content)
    return content


@torch.inference_mode()
def _draw_attention(model: Decoder, recipe: Recipe, path: Path) -> None:
    task = recipe.build_task()
    tokens = task.sample(seeded("heatmap", recipe.seed), 1, HEATMAP_TOKENS).tokens
    model.eval()
    weights = [layer[0] for layer in model.attention_weights(tokens.to(model.head.weight.device))]
    attention_heatmap({"TRA": weights}, [task.symbols[token] for token in tokens[0].tolist()], path)

"""A run folder, read back: `recipe.json`, `metrics.jsonl`, `speed.jsonl`, `checkpoints/`, `results.json`, and
`tokenizer.json` of a run on text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tra import checkpoint
from tra.errors import RunError
from tra.model import Decoder
from tra.recipes import Recipe
from tra.report import environment, write_json
from tra.tasks import Task

TOKENIZER = "tokenizer.json"


def load_recipe(folder: Path) -> Recipe:
    """The recipe as it was trained."""
    stored = folder / "recipe.json"
    if not stored.exists():
        raise ValueError(f"run must be a folder that holds recipe.json, got {folder}")
    try:
        return Recipe.from_json(stored.read_text())
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{stored} is not a recipe that this version can read: {error}") from error


def with_own_tokenizer(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the tokenizer that its run has stored: the text that it was trained on may have gone."""
    if recipe.text is None or not (folder / TOKENIZER).exists():
        return recipe
    return replace(recipe, text=replace(recipe.text, tokenizer=str(folder.absolute())))


def load_task(folder: Path) -> Task:
    """What a run was trained on."""
    return with_own_tokenizer(load_recipe(folder), folder).build_task()


def load_model(folder: Path) -> tuple[Decoder, int]:
    """The model of a run's newest intact checkpoint, on the accelerator if there is one, and the checkpoint's step."""
    recipe = load_recipe(folder)
    found = checkpoint.latest(folder / "checkpoints")
    if found is None:
        raise RunError(f"run {folder} has no intact checkpoint yet")
    model = Decoder(recipe.model)
    model.load_state_dict(found.tensors("model"))
    return model.to(best_device()).eval(), found.step


def best_device() -> torch.device:
    """Where to compute: the accelerator if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def store_results(folder: Path, recipe: Recipe, step: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Write ``results.json``: what was measured, on which weights, of which version of the task, where."""
    content = {
        "step": step,
        "steps": recipe.steps,
        "task": recipe.task,
        "task_version": recipe.build_task().version,
        "environment": environment(),
        "results": results,
    }
    write_json(folder / "results.json", content)
    return content

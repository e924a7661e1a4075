"""A run folder, read back: `recipe.json`, `metrics.jsonl`, `speed.jsonl`, `checkpoints/`, `results.json`."""

from pathlib import Path

from tra import checkpoint
from tra.errors import RunError
from tra.model import Decoder
from tra.recipes import Recipe


def load_recipe(folder: Path) -> Recipe:
    stored = folder / "recipe.json"
    if not stored.exists():
        raise ValueError(f"run must be a folder that holds recipe.json, got {folder}")
    try:
        return Recipe.from_json(stored.read_text())
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{stored} is not a recipe that this version can read: {error}") from error


def load_model(folder: Path) -> Decoder:
    """The model of a run's newest intact checkpoint, ready for inference."""
    recipe = load_recipe(folder)
    found = checkpoint.latest(folder / "checkpoints")
    if found is None:
        raise RunError(f"run {folder} has no intact checkpoint yet")
    model = Decoder(recipe.model)
    model.load_state_dict(found.tensors("model"))
    return model.eval()

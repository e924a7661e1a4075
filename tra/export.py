"""A run as a Hugging Face folder: weights, config, tokenizer, and a card with the recipe and what was measured."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from tra.errors import RunError
from tra.files import write_whole
from tra.hub import TraForCausalLM, from_decoder
from tra.recipes import Recipe
from tra.report import results_table
from tra.runs import load_model, load_recipe, load_task
from tra.text import Text
from tra.text.tokenizer import END


def export(run: Path, folder: Path) -> None:
    """Write the folder, which must not exist yet; it appears whole or not at all."""
    if folder.exists():
        raise ValueError(f"folder must not exist yet, got {folder}")
    logging.disable_progress_bar()  # of one file
    recipe = load_recipe(run)
    model, tokenizer, step = as_pretrained(run)
    if step < recipe.steps:
        warnings.warn(f"the run is at step {step} of {recipe.steps}", stacklevel=2)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        write_whole(aside / "README.md", model_card(recipe, step, _results(run, step), folder.name))
        os.rename(aside, folder)
    except (OSError, SafetensorError) as error:
        raise RunError(f"could not write {folder}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def as_pretrained(run: Path) -> tuple[TraForCausalLM, PreTrainedTokenizerFast | None, int]:
    """The model of a run, its tokenizer, which only a run on text has, and its step."""
    task = load_task(run)
    decoder, step = load_model(run)
    if not isinstance(task, Text):
        return from_decoder(decoder), None, step
    end = task.tokenizer.token_to_id(END)
    special = {} if end is None else {"eos_token": END, "pad_token": END}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=task.tokenizer, padding_side="left", clean_up_tokenization_spaces=False, **special
    )
    return from_decoder(decoder, eos_token_id=end, pad_token_id=end), tokenizer, step


def model_card(recipe: Recipe, step: int, results: dict[str, Any] | None, name: str) -> str:
    """The README of a model."""
    model, text = recipe.model, recipe.text
    if text is not None:
        trained = f"{Path(text.train).name} in windows of {recipe.length:,} tokens"
    else:
        task = recipe.build_task()
        trained = f"{recipe.task} at up to {recipe.length:,} {task.unit}"
    parts = [
        "---\nlibrary_name: transformers\ntags:\n- threshold-relative-attention\n"
        + ("pipeline_tag: text-generation\n" if text else "")
        + "---\n",
        f"# {name}\n",
        f"A decoder of {model.layers} layers, {model.heads} heads and width {model.width} with {model.attention} "
        f"attention, trained with threshold-relative-attention on {trained}, for {step:,} of {recipe.steps:,} steps.\n",
        "```python\nimport tra.hub  # registers the model; no code is loaded from this folder\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        + (f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' if text else "")
        + "```\n",
    ]
    if text is None:
        parts.append(f"It has no tokenizer: token i is the i-th of `{' '.join(task.symbols)}`.\n")
    if results is None:
        parts.append("## Results\n\nNothing was measured.\n")
    else:
        on = f"{Path(text.evaluation or text.train).name}, " if text else ""
        at = f"Measured on {on}with {results['environment']['processor']}.\n"
        # The tables are sections of their own where they stand alone.
        table = results_table(model.attention, results["results"]).replace("## ", "### ")
        parts.append(f"## Results\n\n{at}\n{table}")
    parts.append(f"## Recipe\n\n```json\n{recipe.to_json()}```\n")
    return "\n".join(parts)


def _results(run: Path, step: int) -> dict[str, Any] | None:
    """What was measured with the weights of this step."""
    stored = run / "results.json"
    content = json.loads(stored.read_text()) if stored.exists() else {}
    return content if content.get("results") and content["step"] == step else None

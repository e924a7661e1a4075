"""A run as a Hugging Face folder: weights, config, tokenizer, and a card with the recipe and what was measured."""

import warnings
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from tra import plugins
from tra.attention.naming import plugins_of
from tra.errors import DISTRIBUTION, RunError, install_command
from tra.files import write_text, written_aside
from tra.hub.config import MODULE
from tra.hub.modeling import TraForCausalLM, from_decoder
from tra.report.tables import results_table
from tra.runs import Run, load_run
from tra.runs.folder import Measured
from tra.tasks import ReadsText
from tra.text.tokenizer import END


def export(run: Run | Path | str, folder: Path | str, auto_map: bool = True) -> None:
    """Write the folder, which must not exist yet; it appears whole or not at all.

    With ``auto_map``, tools that load it with ``trust_remote_code=True`` find this package by themselves.
    """
    run, folder = run if isinstance(run, Run) else load_run(run), Path(folder)
    if folder.exists():
        raise ValueError(f"folder must not exist yet, got {folder}")
    logging.disable_progress_bar()  # of one file
    model, tokenizer = as_pretrained(run)
    if not auto_map:
        model.config.auto_map = {}
    if run.step < run.recipe.steps:
        warnings.warn(f"the run is at step {run.step} of {run.recipe.steps}", stacklevel=2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written_aside(folder) as aside:
            model.save_pretrained(aside)
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
            write_text(aside / "README.md", model_card(run, folder.name, auto_map))
    except (OSError, SafetensorError) as error:
        raise RunError(f"could not write {folder}: {error}") from error


def as_pretrained(run: Run) -> tuple[TraForCausalLM, PreTrainedTokenizerFast | None]:
    """The model of a run, and its tokenizer, which only a run on text has."""
    task, decoder = run.task, run.model
    if not isinstance(task, ReadsText):
        return from_decoder(decoder), None
    end = task.tokenizer.token_to_id(END)
    special = {} if end is None else {"eos_token": END, "pad_token": END}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=task.tokenizer, padding_side="left", clean_up_tokenization_spaces=False, **special
    )
    return from_decoder(decoder, eos_token_id=end, pad_token_id=end), tokenizer


def model_card(run: Run, name: str, auto_map: bool = True) -> str:
    """The README of a model."""
    recipe, task = run.recipe, run.task
    model, reads = recipe.model, isinstance(task, ReadsText)
    trained, measured_on = task.texts() if isinstance(task, ReadsText) else (recipe.task, "")
    needed = plugins_of(model.attention)
    parts = [
        "---\nlibrary_name: transformers\ntags:\n- threshold-relative-attention\n"
        + ("pipeline_tag: text-generation\n" if reads else "")
        + "---\n",
        f"# {name}\n",
        f"A decoder of {model.layers} layers, {model.heads} heads and width {model.width} with {model.label} "
        f"attention, trained with threshold-relative-attention on {Path(trained).name} at up to {recipe.length:,} "
        f"{task.unit}, for {run.step:,} of {recipe.steps:,} steps.\n",
        f"## Use\n\n```bash\n{install_command('hub')}  # in a clone of {DISTRIBUTION}\n```\n",
        "```python\nimport tra.hub  # registers the model; no code is loaded from this folder\n"
        + "".join(f'tra.plugins.load("{plugin}")  # which has the mechanism\n' for plugin in needed)
        + f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if reads else ''}\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        + (f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' if reads else "")
        + "```\n",
        *_use_with_other_tools(name, recipe.length, reads, auto_map),
    ]
    if recipe.plugins:
        names = (
            f"{name} ({version})" if version else name for name, version in plugins.versions(recipe.plugins).items()
        )
        parts.append(f"It was trained with names from outside the package, of the plug-in {', '.join(names)}.\n")
    if not reads:
        parts.append(f"It has no tokenizer: token i is the i-th of `{' '.join(task.symbols)}`.\n")
    measured = _measured(run)
    if measured is None:
        parts.append("## Results\n\nNothing was measured.\n")
    else:
        on = f"on {Path(measured_on).name}, " if measured_on else ""
        at = f"Measured {on}with {measured.environment['processor']}.\n"
        # The tables are sections of their own where they stand alone.
        table = results_table(model.label, measured.results, task.unit).replace("## ", "### ")
        parts.append(f"## Results\n\n{at}\n{table}")
    parts.append(f"## Recipe\n\n```json\n{recipe.to_json()}```\n")
    return "\n".join(parts)


def _use_with_other_tools(name: str, length: int, reads: bool, auto_map: bool) -> list[str]:
    parts = []
    if auto_map:
        parts.append(
            "A tool that knows nothing of the package loads the folder with `trust_remote_code=True`: the one file of "
            f"code in it, `{MODULE}.py`, does no more than import the package.\n"
        )
    parts.append(
        "LoRA and other adapters of peft find their layers (`query` and `value`) by themselves; all of them are "
        "`query`, `key`, `value`, `output`, `expand`, `contract`.\n"
    )
    if auto_map and reads:
        parts.append(
            "To evaluate it with the lm-evaluation-harness, at any length: it was trained on "
            f"{length:,} tokens, and nothing in it ends there.\n\n```bash\n"
            f"lm_eval --model hf --model_args pretrained={name},trust_remote_code=True,max_length={4 * length} "
            "--tasks wikitext\n```\n"
        )
    return parts


def _measured(run: Run) -> Measured | None:
    """What was measured with the weights of this step."""
    found = run.measured()
    return found if found is not None and found.results and found.step == run.step else None

"""`tra train`."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tra import plugins
from tra.cli import is_first_process
from tra.cli.list import outline
from tra.cli.parsing import Common, arguments_of, help_text, on_console, parse
from tra.errors import Interrupted
from tra.progress import say
from tra.recipes import RECIPES, Recipe, build_recipe
from tra.recipes.base import OPTIONS

USAGE = """usage: tra train RECIPE [options]
       tra train --resume RUN [--steps N]

Train a recipe, evaluate it and store the results. --resume continues a stopped run, which ends with the same weights
as an uninterrupted one. With --steps it extends a run with the schedule constant or wsd to that many steps in all.

  tra train RECIPE --help          all fields of the recipe, each of which is an option
  --model.attention NAME           another mechanism; rope+tra has TRA in every second layer
  --model.options NAME=VALUE ...   options of the mechanism; tra list shows them
  --task-options NAME=VALUE ...    options of the task; they override the recipe's
  --init-from RUN|FOLDER           begin with the weights of another run or of an exported model
  --schedule NAME                  learning rate after the warm-up: cosine, constant, or wsd (warm-up, stable, decay)
  --validate-every N               measure while training, and keep the best checkpoint (RUN@best)
  --patience N                     stop early after N validations without a new best
  --no-measure                     do not measure after the last step: for a quick trial
  --output FOLDER                  run folder; by default under runs/, named after the recipe and your changes
  --context-parallel N             under torchrun: N processes share each sequence
  --track NAME ...                 send the metrics to trackers: tensorboard, wandb, trackio, ...
  --threads N                      threads to compute with
  --plugin MODULE|FILE.py ...      your own mechanisms, tasks and recipes

recipes:
"""


@dataclass(frozen=True, kw_only=True)
class Train(Common):
    """Train a recipe, evaluate it and store the results. Options override fields of the recipe.

    --model.options is short for --model.attention-options.
    """

    recipe: str | None = field(default=None, metadata={"positional": "RECIPE"})
    """What to train."""
    changes: dict[str, Any] = field(default_factory=dict, metadata={"flat": Recipe})
    """What the run has in place of what the recipe says."""
    output: Path | None = None
    """Run folder; by default runs/RECIPE-ATTENTION-SEED, with your changes in its name."""
    resume: Path | None = None
    """Resume the run in this folder (give no RECIPE); --steps N extends it to N steps in all."""
    track: tuple[str, ...] = ()
    """Send the metrics to any tracker of accelerate: tensorboard, wandb, trackio, ..."""
    measure: bool = True
    """--no-measure skips the evaluation after the last step; tra evaluate does it later."""
    context_parallel: int = 1
    """Number of processes, started by torchrun, that share each sequence."""
    reuse_memory: bool = True
    """On a CPU, let the allocator keep freed memory for the next step."""


def run(arguments: list[str]) -> int:
    options = parse(Train, arguments, "train", _help)
    if options.resume is not None:
        recipe, folder = _resumed(options, options.resume), options.resume
    elif options.recipe is not None:
        usual = build_recipe(options.recipe, options.changes.get("model.attention"))
        recipe = usual.adjusted(_one_by_one(options.changes))
        folder = options.output or Path("runs") / recipe.folder_name(usual)
    else:
        known = ", ".join(plugins.every("RECIPES", RECIPES))
        raise ValueError(f"RECIPE or --resume RUN must be given; recipes: {known}")

    from tra.runs import train
    from tra.runs.memory import reuse_memory

    if options.reuse_memory:
        reuse_memory()
    with on_console():
        try:
            train(
                recipe,
                folder,
                track=options.track,
                resume=options.resume is not None,
                measure=options.measure,
                context_parallel=options.context_parallel,
            )
        except Interrupted as stop:
            again = shlex.join(["tra", "train", "--resume", str(folder), *options.plugin_words])
            raise Interrupted(f"{stop}; go on with: {again}") from None
        if not options.measure:
            say(f"not measured; tra evaluate {folder} does it")
    if is_first_process():
        print(folder)
    return 0


def _help(given: Mapping[str, Any]) -> str:
    if given.get("recipe") is not None:
        return help_text(Train, "train", build_recipe(given["recipe"], given.get("model.attention")))
    recipes = plugins.every("RECIPES", RECIPES)
    return USAGE + "".join(f"  {name:<22} {outline(make)}\n" for name, make in recipes.items())


def _one_by_one(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe, each given option of the task and of the mechanism by itself."""
    options = {f"{name}.{option}": x for name in OPTIONS for option, x in given.get(name, {}).items()}
    return {**{name: value for name, value in given.items() if name not in OPTIONS}, **options}


def _resumed(options: Train, folder: Path) -> Recipe:
    """The recipe of the run to go on with, extended where more steps are given."""
    own = {"recipe": options.recipe, "output": options.output}
    given = {**options.changes, **{key: value for key, value in own.items() if value is not None}}
    steps = given.pop("steps", None)
    for option in arguments_of(Train):
        if option.key in given:
            raise ValueError(
                f"{option.name} must not be given with --resume: a run goes on as it began; train another elsewhere"
            )
    from tra.runs import load_run

    recipe = load_run(folder).recipe
    return recipe if steps is None else recipe.extended(steps)

"""`tra train`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from tra import plugins
from tra.cli import is_first_process
from tra.cli.list import outline
from tra.cli.options import Common, merged, on_console, option_names, parse, value_of
from tra.errors import Interrupted
from tra.recipes import RECIPES, Recipe, build_recipe
from tra.tasks import TASKS, task_options

USAGE = """usage: tra train RECIPE [options]
       tra train --resume RUN

Train a recipe, measure it and store what was found. A run that is stopped goes on with --resume and ends with the same
weights as one that never was.

  tra train RECIPE --help          everything that a recipe says, each an option that overrides it
  --model.attention NAME           another mechanism, with the learning rate that the recipe has for it
  --model.options NAME=VALUE ...   options of the mechanism; tra list shows them
  --task-options NAME=VALUE ...    options of the task, over those of the recipe
  --output FOLDER                  run folder; runs/RECIPE-ATTENTION-SEED by default
  --track NAME ...                 trackers to tell the metrics too: tensorboard, wandb, trackio, ...
  --plugin MODULE|FILE.py ...      mechanisms, tasks and recipes of one's own

recipes:
"""


@dataclass(frozen=True)
class Train(Common):
    """Train a recipe, measure it and store what was found. Options override what the recipe says.

    --model.options is short for --model.attention-options.
    """

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    output: Path | None = None
    """Run folder; runs/RECIPE-ATTENTION-SEED by default."""
    track: tuple[str, ...] = ()
    """Trackers to tell the metrics too, whichever accelerate knows: tensorboard, wandb, trackio, ..."""


@dataclass(frozen=True)
class Resume(Common):
    """Go on with an interrupted run."""

    resume: Path
    """The run folder."""
    track: tuple[str, ...] = ()
    """Trackers to tell the metrics too."""


def run(arguments: list[str]) -> int:
    recipes = plugins.every("RECIPES", RECIPES)
    options: Train | Resume
    if arguments and not arguments[0].startswith("-"):
        options, recipe, folder = _recipe(arguments[0], arguments[1:])
    elif any(argument.split("=")[0] == "--resume" for argument in arguments):
        options, recipe, folder = _resume(arguments)
    elif {"-h", "--help"} & set(arguments):
        print(USAGE + "\n".join(f"  {name:<22} {outline(make)}" for name, make in recipes.items()))
        return 0
    else:
        raise ValueError(f"recipe, before all options, or --resume RUN must be given; recipes: {', '.join(recipes)}")

    from tra.runs import train

    with on_console():
        try:
            train(recipe, folder, track=options.track)
        except Interrupted as stop:
            again = " ".join(["tra train --resume", str(folder), *options.plugin_words])
            raise Interrupted(f"{stop}; go on with: {again}") from None
    if is_first_process():
        print(folder)
    return 0


def _recipe(name: str, arguments: list[str]) -> tuple[Train, Recipe, Path]:
    usual = build_recipe(name, value_of(arguments, "--model.attention"))
    arguments = merged(arguments, "--task-options", _kept_options(usual, value_of(arguments, "--task")))
    arguments = merged(arguments, "--model.attention-options", usual.model.attention_options)
    # Evaluations follow the length, which must be known first: those of the recipe may not suit other options.
    options = parse(Train, arguments, f"train {name}", Train(recipe=replace(usual, evaluations=())))
    recipe = options.recipe.measured_like(usual)
    folder = options.output or Path("runs") / recipe.folder_name
    if is_first_process():
        _check_free(folder, recipe)
    return options, recipe, folder


def _kept_options(usual: Recipe, task: str | None) -> dict[str, object]:
    """The recipe's task options, of which another task keeps those that it has too."""
    if task is None:
        return usual.task_options
    known = task_options(plugins.find("TASKS", TASKS, task, "task"))
    return {name: value for name, value in usual.task_options.items() if name in known}


def _check_free(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder that holds a run already, and say how to go on."""
    from tra.runs import Run

    run = Run(folder)
    if not run.exists:
        return
    finished = run.finished(run.recipe) is not None
    differ = run.recipe.differences(recipe)
    if finished and set(differ) == {"steps"}:
        raise ValueError(
            f"output {folder} holds this run, finished after {run.recipe.steps} steps: it cannot be extended, because "
            f"its learning rate has come to its end; train for {recipe.steps} steps in another folder, with --output"
        )
    run.check_recipe(recipe)
    if finished:
        raise ValueError(f"output {folder} holds this run, finished: measure it by tra evaluate {folder}")
    raise ValueError(f"output {folder} already holds this run: go on with it by tra train --resume {folder}")


def _resume(arguments: list[str]) -> tuple[Resume, Recipe, Path]:
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in option_names(Train) and name not in option_names(Resume):
            raise ValueError(
                f"{name} must not be given with --resume: a run goes on as it began; train another elsewhere"
            )
    options = parse(Resume, arguments, "train")
    from tra.runs import load_run

    return options, load_run(options.resume).recipe, options.resume

"""`tra train`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from tra import plugins
from tra.cli import is_first_process
from tra.cli.options import Common, listed, on_console, option_names, parse, value_of
from tra.errors import Interrupted
from tra.recipes import RECIPES, Recipe, build_recipe


@dataclass(frozen=True)
class Train(Common):
    """Train a recipe, measure it and store what was found. Options override what the recipe says."""

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


def run(arguments: list[str]) -> int:
    names = ", ".join(plugins.every("RECIPES", RECIPES))
    if arguments and not arguments[0].startswith("-"):
        recipe, folder, track = _recipe(arguments[0], arguments[1:])
    elif any(argument.split("=")[0] == "--resume" for argument in arguments):
        recipe, folder, track = _resume(arguments)
    elif {"-h", "--help"} & set(arguments):
        print(f"usage: tra train RECIPE [options] | tra train --resume RUN\nrecipes: {names}")
        return 0
    else:
        raise ValueError(f"recipe or --resume RUN must be given; recipes: {names}")

    from tra.runs import train

    with on_console():
        try:
            train(recipe, folder, track=track)
        except Interrupted as stop:
            raise Interrupted(f"{stop}; go on with: tra train --resume {folder}") from None
    if is_first_process():
        print(folder)
    return 0


def _recipe(name: str, arguments: list[str]) -> tuple[Recipe, Path, tuple[str, ...]]:
    usual = build_recipe(name, value_of(arguments, "--model.attention"))
    options = parse(Train, arguments, f"train {name}", Train(recipe=usual))
    recipe = options.recipe
    task_options = {**usual.task_options, **recipe.task_options}
    recipe = replace(recipe, task_options=task_options)
    if recipe.length != usual.length:
        recipe = recipe.measured_like(usual)
    folder = options.output or Path("runs") / recipe.folder_name
    if is_first_process():
        _check_free(folder, recipe)
    return recipe, folder, listed(options.track)


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


def _resume(arguments: list[str]) -> tuple[Recipe, Path, tuple[str, ...]]:
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in option_names(Train) and name not in option_names(Resume):
            raise ValueError(
                f"{name} must not be given with --resume: a run goes on as it began; train another elsewhere"
            )
    options = parse(Resume, arguments, "train")
    from tra.runs import load_run

    return load_run(options.resume).recipe, options.resume, listed(options.track)

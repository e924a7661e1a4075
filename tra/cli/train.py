"""`tra train`."""

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from tra import plugins
from tra.cli import is_first_process
from tra.cli.list import outline
from tra.cli.parsing import Common, given_options, on_console, option_names, parse, settings
from tra.errors import Interrupted
from tra.progress import say
from tra.recipes import RECIPES, Recipe, build_recipe
from tra.tasks import TASKS, task_options

USAGE = """usage: tra train RECIPE [options]
       tra train --resume RUN [--steps N]

Train a recipe, measure it and store what was found. A run that is stopped goes on with --resume and ends with the same
weights as one that never was. With --steps, a run whose schedule is constant or wsd goes on to that many steps in all.

  tra train RECIPE --help          everything that a recipe says, each an option that overrides it
  --model.attention NAME           another mechanism; rope+tra has TRA in every second layer
  --model.options NAME=VALUE ...   options of the mechanism; tra list shows them
  --task-options NAME=VALUE ...    options of the task, over those of the recipe
  --init-from RUN|FOLDER           begin with the weights of another run or of an exported model
  --schedule NAME                  learning rate after the warm-up: cosine, constant, or wsd (warm-up, stable, decay)
  --validate-every N               measure while training, and keep the best checkpoint (RUN@best)
  --patience N                     stop early after N validations without a new best
  --no-measure                     do not measure after the last step: for a quick trial
  --output FOLDER                  run folder; under runs/ by default, with what differs from the recipe in its name
  --context-parallel N             under torchrun: N processes share each sequence
  --track NAME ...                 trackers to tell the metrics too: tensorboard, wandb, trackio, ...
  --threads N                      threads to compute with
  --plugin MODULE|FILE.py ...      mechanisms, tasks and recipes of one's own

recipes:
"""


@dataclass(frozen=True)
class Draft(Recipe):
    """A recipe while options change it, which is checked when it is whole."""

    def __post_init__(self) -> None:
        pass

    @classmethod
    def of(cls, recipe: Recipe) -> "Draft":
        return cls(**_values(recipe))


@dataclass(frozen=True, kw_only=True)
class Settings(Common):
    """What can be said of a run whether it begins or goes on."""

    track: tuple[str, ...] = ()
    """Trackers to tell the metrics too, whichever accelerate knows: tensorboard, wandb, trackio, ..."""
    measure: bool = True
    """--no-measure leaves out measuring after the last step; tra evaluate does it later."""
    context_parallel: int = 1
    """How many of the processes that torchrun started share each sequence, each with a part of its tokens."""
    reuse_memory: bool = True
    """On a CPU, let the allocator keep freed memory for the next step."""


@dataclass(frozen=True)
class Train(Settings):
    """Train a recipe, measure it and store what was found. Options override what the recipe says.

    --model.options is short for --model.attention-options.
    """

    recipe: Annotated[Draft, tyro.conf.arg(name="")]
    output: Path | None = None
    """Run folder; by default runs/RECIPE-ATTENTION-SEED, with what differs from the recipe in its name."""


@dataclass(frozen=True)
class Resume(Settings):
    """Go on with an interrupted run."""

    resume: Path
    """The run folder."""
    steps: int | None = None
    """Extend the run to so many steps in all, exactly as if it had been planned so."""


def run(arguments: list[str]) -> int:
    given = given_options(arguments)
    recipes = plugins.every("RECIPES", RECIPES)
    options: Train | Resume
    if arguments and not arguments[0].startswith("-"):
        options, recipe, usual = _recipe(arguments[0], arguments[1:], given)
        folder = options.output or Path("runs") / recipe.folder_name(usual)
    elif "--resume" in given:
        options, recipe = _resume(arguments, given)
        folder = options.resume
    elif {"-h", "--help"} & given.keys():
        print(USAGE + "\n".join(f"  {name:<22} {outline(make)}" for name, make in recipes.items()))
        return 0
    else:
        raise ValueError(f"recipe, before all options, or --resume RUN must be given; recipes: {', '.join(recipes)}")

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
                resume=isinstance(options, Resume),
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


def _recipe(name: str, arguments: list[str], given: dict[str, list[str]]) -> tuple[Train, Recipe, Recipe]:
    """The options of a command, the recipe as they change it, and the recipe itself."""
    mechanisms = given.get("--model.attention", [])
    usual = build_recipe(name, mechanisms[-1] if mechanisms else None)
    options = parse(Train, arguments, f"train {name}", Train(recipe=Draft.of(usual)))
    changed = options.recipe
    own_task, own_mechanism = (
        settings(given.get(option, ())) for option in ("--task-options", "--model.attention-options")
    )
    changed = replace(
        changed,
        model=replace(changed.model, attention_options={**usual.model.attention_options, **own_mechanism}),
        task_options={**_kept_options(usual, changed.task), **own_task},
    )
    return options, Recipe(**{**_values(changed), "evaluations": changed.rescaled_evaluations(usual)}), usual


def _values(recipe: Recipe) -> dict[str, Any]:
    return {entry.name: getattr(recipe, entry.name) for entry in fields(Recipe)}


def _kept_options(usual: Recipe, task: str) -> dict[str, Any]:
    """The recipe's task options, of which another task keeps those that it has too."""
    known = task_options(plugins.find("TASKS", TASKS, task, "task"))
    return {name: value for name, value in usual.task_options.items() if task == usual.task or name in known}


def _resume(arguments: list[str], given: dict[str, list[str]]) -> tuple[Resume, Recipe]:
    for name in given:
        if name in option_names(Train) and name not in option_names(Resume):
            raise ValueError(
                f"{name} must not be given with --resume: a run goes on as it began; train another elsewhere"
            )
    options = parse(Resume, arguments, "train")
    from tra.runs import load_run

    recipe = load_run(options.resume).recipe
    return options, recipe if options.steps is None else recipe.extended(options.steps)

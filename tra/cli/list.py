"""`tra list`."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tra.cli.parsing import Common, parse
from tra.signatures import Option, format_value


@dataclass(frozen=True)
class List(Common):
    """List recipes, mechanisms and tasks with their options, experiments, model sizes, implementations of the operator
    with what each refuses, and plug-ins with the names that they bring."""

    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    options = parse(List, arguments, "list")
    content = everything()
    if options.json:
        print(json.dumps(content, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    for kind, entries in content.items():
        table = Table("name", "what", title=kind, title_justify="left", title_style="bold")
        for name, text in entries.items():
            table.add_row(name, text)
        if entries:
            Console().print(table)
    return 0


def everything() -> dict[str, dict[str, str]]:
    """What there is to name, by kind, with a line for each."""
    from tra import plugins
    from tra.attention import MECHANISMS
    from tra.attention.options import options_of
    from tra.experiments import BUILT_IN
    from tra.model import SIZES
    from tra.ops.threshold_relative import describe_implementations
    from tra.recipes import RECIPES
    from tra.tasks import TASKS, task_options

    return {
        "implementations": describe_implementations(),
        "recipes": {name: outline(make) for name, make in plugins.every("RECIPES", RECIPES).items()},
        "attention": {
            name: _first_line(mechanism) + _options(options_of(mechanism))
            for name, mechanism in plugins.every("MECHANISMS", MECHANISMS).items()
        },
        "tasks": {
            name: _about(make) + _options(task_options(make)) for name, make in plugins.every("TASKS", TASKS).items()
        },
        "experiments": {
            name: _first_line(importlib.import_module(place.partition(":")[0])) for name, place in BUILT_IN.items()
        },
        "sizes": {
            name: f"{size.layers} layers, {size.heads} heads, width {size.width}" for name, size in SIZES.items()
        },
        "plugins": plugins.described(),
    }


def _first_line(thing: object) -> str:
    return ((thing.__doc__ or "").strip().splitlines() or [""])[0]


def _about(make: Callable[..., Any]) -> str:
    """What a task is, as its module says, and which of several it is, as its class says."""
    module = _first_line(sys.modules[make.__module__]) if isinstance(make, type) else ""
    return " ".join(part for part in (module, _first_line(make)) if part)


def _options(options: Mapping[str, Option]) -> str:
    shown = (f"{name}={format_value(option.default)}" for name, option in options.items())
    return f" Options: {', '.join(shown)}." if options else ""


def outline(make: Callable[..., Any]) -> str:
    """A recipe in a line, given its function."""
    try:
        recipe = make()
    except Exception as error:  # that of a plug-in may raise anything, and the others are to be listed all the same
        return f"cannot be made: {error}"
    model = recipe.model
    return (
        f"{recipe.task}, up to {recipe.length} {recipe.build_task().unit}; {model.layers} layers, width {model.width}; "
        f"{recipe.steps:,} steps of {recipe.batch}"
    )

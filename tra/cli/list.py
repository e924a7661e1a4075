"""`tra list`."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tra import plugins
from tra.cli.parsing import Common, parse
from tra.signatures import Option, format_value

if TYPE_CHECKING:
    from tra.runs import Run

STORED = Path(__file__).parent / "catalogue.json"
"""What `everything` gives without plug-ins; `python -m tra.cli.list` writes it, and a test holds the two together."""


@dataclass(frozen=True)
class List(Common):
    """List recipes, mechanisms and tasks with their options, experiments, model sizes, the trained models of the
    package, and plug-ins with the names that they add."""

    implementations: bool = False
    """Also the implementations of the operator on this machine, with what each refuses."""
    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    options = parse(List, arguments, "list")
    content = {**(_implementations() if options.implementations else {}), **listed_names()}
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


def listed_names() -> dict[str, dict[str, str]]:
    """What there is to name, by kind, with a line for each.

    Without plug-ins it is known beforehand, and stored: to find it out takes seconds, most of them for PyTorch.
    """
    if plugins.loaded() or plugins.installed():
        return everything()
    return json.loads(STORED.read_text(encoding="utf-8"))


def _implementations() -> dict[str, dict[str, str]]:
    from tra.ops.threshold_relative import describe_implementations

    return {"implementations": describe_implementations()}


def everything() -> dict[str, dict[str, str]]:
    """The same, found out."""
    from tra.attention import MECHANISMS
    from tra.attention.options import options_of
    from tra.experiments import BUILT_IN
    from tra.model import SIZES
    from tra.recipes import RECIPES
    from tra.runs.folder import PRETRAINED, load_run, pretrained_runs
    from tra.tasks import TASKS, task_options

    return {
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
        "pretrained": {name: _trained(load_run(name)) for name in (PRETRAINED + name for name in pretrained_runs())},
        "plugins": plugins.described(),
    }


def _trained(run: "Run") -> str:
    """A trained model in a line."""
    recipe = run.recipe
    return f"{recipe.name} with {recipe.model.label} attention, trained for {recipe.steps:,} steps"


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


if __name__ == "__main__":
    STORED.write_text(json.dumps(everything(), indent=2) + "\n", encoding="utf-8")

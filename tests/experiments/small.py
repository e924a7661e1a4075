"""Experiments that take seconds, and what they leave behind."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tra.experiments import Experiment, Request
from tra.experiments.grid import Grid
from tra.experiments.table1 import SMOKE
from tra.recipes import Evaluation, Recipe, RecipeOf

PNG = b"\x89PNG"


@cache
def flip_flop(attention: str = "tra") -> Recipe:
    """Four steps of a narrow layer at 8 tokens, measured at 8 and 16."""
    return replace(SMOKE["flip_flop"](attention=attention), evaluations=sets("iid"))


def sets(*names: str) -> tuple[Evaluation, ...]:
    return tuple(Evaluation(name, length, 4) for length in (8, 16) for name in names)


def _with_sets(column: str, *names: str) -> RecipeOf:
    @cache
    def recipe(attention: str = "tra") -> Recipe:
        return replace(SMOKE[column](attention=attention), evaluations=sets(*names))

    return recipe


TWO_COLUMNS = Experiment(
    scales={
        "smoke": {
            "flip_flop": _with_sets("flip_flop", "iid", "dense"),
            "instructed": _with_sets("instructed", "all", "copy"),
        }
    },
    rows=("tra", "rope", "nope"),
    seeds=2,
)
"""A task whose length is in tokens, and one with several sets and their union."""


def of_flip_flop(**changes: Any) -> Experiment:
    """One column, the mechanisms TRA and RoPE, one seed."""
    return replace(Experiment({"smoke": {"flip_flop": flip_flop}}, ("tra", "rope")), **changes)


def grid_of(experiment: Experiment, folder: Path = Path("out"), scale: str = "smoke", **asked: Any) -> Grid:
    """The runs that a request comes to."""
    return Grid.of(experiment, Request(folder, scale, **asked))


def smoke(name: str | Path, folder: Path, *options: str) -> list[str]:
    """A command."""
    return ["reproduce", str(name), "--scale", "smoke", "--output", str(folder), *options]


def content_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def files_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file, and when it was written."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def made_in(folder: Path) -> set[str]:
    """The files beside the runs."""
    return {path.name for path in folder.iterdir() if path.is_file() and path.name != ".lock"}

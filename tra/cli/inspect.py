"""`tra inspect`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tra.cli.options import Common, parse
from tra.cli.texts import or_file


@dataclass(frozen=True)
class Inspect(Common):
    """Draw a run's attention on one sequence, white where it is exactly null, and summarise every head."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    text: str | None = None
    """What a run on text is to read, or @FILE; without it, and for other runs, it is a sequence of their task."""
    length: int = 32
    """Of a task's sequence, in its unit."""
    output: Path | None = None
    """Folder to write; RUN/inspection by default."""
    figures: tuple[str, ...] = ("png",)
    """Formats of the figure: png, svg, pdf."""
    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    options = parse(Inspect, arguments, "inspect")
    from tra.report.inspection import MOST_TOKENS, write_inspection
    from tra.runs import load_run
    from tra.tasks import ReadsText

    found = load_run(options.run)
    task = found.task
    if not 1 <= options.length <= MOST_TOKENS:
        raise ValueError(f"length must be between 1 and {MOST_TOKENS}, got {options.length}")
    if options.text is None:
        tokens, symbols = task.example(options.length)
    elif isinstance(task, ReadsText):
        tokens, symbols = task.read(or_file(options.text, "text"))
    else:
        raise ValueError(f"text must be left out: {options.run} was trained on {found.recipe.task}")
    folder = options.output or found.inspection
    content = write_inspection(found.model, tokens, symbols, folder, options.figures)
    if options.json:
        print(json.dumps(content, indent=2))
    else:
        print((folder / "heads.md").read_text())
        print(folder)
    return 0

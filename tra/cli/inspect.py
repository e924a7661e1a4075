"""`tra inspect`."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from tra.cli.parsing import Common, parse
from tra.cli.texts import or_file

PAGE = "explorer.html"


@dataclass(frozen=True)
class Inspect(Common):
    """Draw a run's attention on one sequence, white where it is exactly null, and summarise every head; or make a page
    of it to look around in."""

    run: Path = field(metadata={"positional": "RUN"})
    """Run: its folder, FOLDER@best, FOLDER@STEP or pretrained:NAME."""
    text: str | None = None
    """What a run on text is to read, or @FILE; without it, and for other runs, it is a sequence of their task."""
    length: int = 32
    """Of a task's sequence, in its unit."""
    output: Path | None = None
    """Folder to write; RUN/inspection by default."""
    html: bool = False
    """Write explorer.html, a page for the browser that needs nothing else, in place of a figure."""
    beside: Path | None = None
    """Another run to show beside it on the same sequence, with --html."""
    figures: tuple[str, ...] = ()
    """Formats of the figure: png, svg, pdf; png by default, and none with --html."""
    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    options = parse(Inspect, arguments, "inspect")
    if options.beside is not None and not options.html:
        raise ValueError("beside must be given with --html: figures show one run")
    from tra.report.exploring import explorer, read_with
    from tra.report.inspection import write_heads, write_inspection
    from tra.runs import load_run

    found = load_run(options.run)
    text = None if options.text is None else or_file(options.text, "text")
    tokens, symbols = read_with(found, text, options.length)
    folder = options.output or found.inspection
    if options.figures or not options.html:
        content = write_inspection(found.model, tokens, symbols, folder, options.figures or ("png",))
    if options.html:
        others = [] if options.beside is None else [load_run(options.beside)]
        page = explorer(found, *others, text=text, length=options.length)
        page.save(folder / PAGE)
        content = write_heads(found.recipe.model.label, next(iter(page.heads.values())), symbols, folder)
    if options.json:
        print(json.dumps(content, indent=2))
    else:
        print((folder / "heads.md").read_text())
        print(folder / PAGE if options.html else folder)
    return 0

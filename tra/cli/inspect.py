"""`tra inspect`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tra.cli.parsing import Common, parse
from tra.cli.texts import or_file
from tra.errors import RunError

PAGE = "explorer.html"
LEGEND = """\
keys kept: share of the keys whose weight is not exactly 0
null queries: share of the queries that attend to nothing
mean distance: how many tokens back a query looks, by weight
reach: half of the queries have 90% of their weight within this many tokens
gate: 1 means no decay with distance
"""


@dataclass(frozen=True)
class Inspect(Common):
    """Draw a run's attention on one sequence (white is exactly 0) and summarise every head. With --html, write an
    interactive page."""

    run: Path = field(metadata={"positional": "RUN"})
    """Run: its folder, FOLDER@best, FOLDER@STEP or pretrained:NAME."""
    text: str | None = None
    """Text to read, or @FILE, for a run on text; by default a sequence of the run's task."""
    length: int = 32
    """Length of the task's sequence, in its unit."""
    output: Path | None = None
    """Folder to write; RUN/inspection by default."""
    html: bool = False
    """Write explorer.html, a self-contained page for the browser, instead of a figure."""
    beside: Path | None = None
    """With --html: another run to show beside it on the same sequence."""
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
    others = [] if options.beside is None else [load_run(options.beside)]
    try:
        if options.figures or not options.html:
            written = write_inspection(found.model, tokens, symbols, folder, options.figures or ("png",))
        if options.html:
            page = explorer(found, *others, text=text, length=options.length)
            page.save(folder / PAGE)
            written = write_heads(found.recipe.model.label, next(iter(page.heads.values())), symbols, folder)
    except OSError as error:
        raise RunError(f"could not write {folder}: {error.strerror or error}; --output names another folder") from error
    if options.json:
        print(json.dumps(asdict(written), indent=2))
    else:
        print((folder / "heads.md").read_text())
        print(LEGEND)
        print(folder / PAGE if options.html else folder)
    return 0

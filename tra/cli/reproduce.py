"""`tra reproduce`."""

import json
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from tra.cli.parsing import Common, on_console, parse
from tra.errors import Interrupted
from tra.experiments import Request, load_experiment


@dataclass(frozen=True)
class Reproduce(Common):
    """Run the grid behind a table or figure of the paper, or behind your own experiment, and make tables and figures
    from the stored results.

    Finished runs are skipped and interrupted ones resume, so the same command can be given again.
    """

    name: str = field(metadata={"positional": "NAME|FILE"})
    """table1, figure1, figure2, figure3, norms, aids, longer, steps, passkey, demo, or the path of a file that defines
    an Experiment called experiment."""
    request: Request = field(metadata={"flat": Request})
    dry_run: bool = False
    """Only print the runs, their parameters and tokens, and the time, estimated from a few measured steps."""
    json: bool = False
    """Print the results as JSON."""


def run(arguments: list[str]) -> int:
    options = parse(Reproduce, arguments, "reproduce")
    experiment = load_experiment(options.name)
    command = shlex.join(["tra", "reproduce", *arguments])
    request = replace(options.request, command=command)
    request = request.for_experiment(Path(options.name).stem, experiment.usual_scale)
    with on_console(quiet=options.json):
        if options.dry_run:
            table = experiment.plan(request)
            print(json.dumps({"headings": table.headings, "rows": table.rows}) if options.json else table.markdown())
            return 0
        try:
            outcome = experiment.perform(request)
        except Interrupted as stop:
            raise Interrupted(f"{stop} by: {command}") from None
    for label, reason in outcome.failures.items():
        print(f"tra: {label} failed: {reason}", file=sys.stderr)
    if options.json:
        print(json.dumps(outcome.content, indent=2))
    else:
        print(outcome.shown)
        print(outcome.folder)
    return 1 if outcome.failures else 0

"""`tra bench`."""

import json
import shlex
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tra.bench import BenchRequest
from tra.cli.parsing import Common, on_console, parse

if TYPE_CHECKING:
    from tra.bench.cases import Case


@dataclass(frozen=True)
class Bench(Common):
    """Time TRA against PyTorch's attention, interleaved in one run, and write the ratios as JSON and a plot.

    With a run, on the queries, keys, values and gates that the trained model makes of its own text or task.
    """

    request: BenchRequest = field(metadata={"flat": BenchRequest})
    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    options = parse(Bench, arguments, "bench")
    from tra.bench import run_benchmarks

    command = shlex.join(["tra", "bench", *arguments])
    request = replace(options.request, folder=options.request.place, command=command)
    with on_console(quiet=options.json):
        on_cases = request.device == "cpu" and not request.cost and request.run is None
        content = run_benchmarks(request, _cases_with_transformers() if on_cases else [])
    print(json.dumps(content, indent=2) if options.json else request.folder)
    return 0


def _cases_with_transformers() -> "list[Case]":
    """None where transformers is not installed, without which all others can be measured."""
    if find_spec("transformers") is None:
        return []
    from tra.hub.bench import generation_cases

    return list(generation_cases())

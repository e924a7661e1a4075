"""`tra demo`."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from tra.cli.parsing import Common, on_console, parse


@dataclass(frozen=True)
class Demo(Common):
    """Train TRA and RoPE on 64-token flip-flop, measure both at up to 4,096 tokens, write tables and figures."""

    output: Path | None = None
    """Folder to write; a new one under runs/ by default."""
    seeds: int = 1
    """Runs of each mechanism, with seeds 0, 1, ..."""
    attention: tuple[str, ...] = ("tra", "rope")
    """Mechanisms to compare."""
    jobs: int = 2
    """Runs at the same time, each with its part of the threads."""


def run(arguments: list[str]) -> int:
    options = parse(Demo, arguments, "demo")
    from tra.errors import Interrupted
    from tra.experiments import Request
    from tra.experiments.demo import DEMO
    from tra.progress import say

    folder = options.output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    words = ["tra", "demo", "--seeds", str(options.seeds), "--attention", *options.attention, "--output", str(folder)]
    again = shlex.join([*words, *options.plugin_words])
    request = Request(
        folder, "quick", seeds=options.seeds, attention=options.attention, jobs=options.jobs, command=again
    )
    began = time.monotonic()
    with on_console():
        try:
            outcome = DEMO.perform(request)
        except Interrupted as stop:
            raise Interrupted(f"{stop} by: {again}") from None
        say(outcome.shown)
        say(f"{time.monotonic() - began:.0f} s. Runs, tables and figures are in {folder}; open the report:")
    print(folder / DEMO.file("report.html"))
    return 1 if outcome.failures else 0

"""`tra reproduce`."""

import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from tra.cli.options import Common, on_console, parse
from tra.errors import Interrupted


@dataclass(frozen=True)
class Reproduce(Common):
    """Run the grid behind a table or figure of the paper, or behind an experiment of one's own, and make tables and
    figures from the stored results.

    Finished runs are skipped and interrupted ones go on where they were, so the same command can be given again.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FILE")]
    """table1, figure1, figure2, figure3, norms, aids, longer, steps, passkey, cost, demo, or the path of a file that
    defines an Experiment called experiment."""
    scale: str | None = None
    """smoke (seconds), small (two cores, hours) or paper (GPUs), or whatever scales a file has; small by default."""
    seeds: int | None = None
    """Runs of each kind, with seeds 0, 1, ...; as many as the experiment says by default."""
    attention: tuple[str, ...] = ()
    """Rows or mechanisms; all of the experiment by default."""
    columns: tuple[str, ...] = ()
    """Columns, tasks say, to run and to show; all of the experiment by default."""
    output: Path | None = None
    """Folder to work in; runs/NAME-SCALE by default."""
    jobs: int = 1
    """Runs at the same time, each with its part of the threads (or a GPU of its own)."""
    shard: str = "1/1"
    """This machine's part of the runs, e.g. 2/3, where several machines share the folder."""
    train: bool = True
    """--no-train makes tables and figures from what is stored, without training."""
    figures: tuple[str, ...] = ("png",)
    """Formats of figures: png, svg, pdf."""
    style: str | None = None
    """A style sheet of matplotlib, by name or path."""
    join: tuple[Path, ...] = ()
    """Files results.json of the same experiment, or of columns that it shares with another, from machines that do not
    share the folder, to be shown with the runs that are here; what was tuned and run there is not done again."""
    cluster: str | None = None
    """Run every run as a job, through submitit: slurm, or local to try it."""
    cluster_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the cluster, e.g. partition=gpu,gpus_per_node=1,timeout_min=600."""
    dry_run: bool = False
    """Only print the runs, their parameters and tokens, and the time, estimated from a few measured steps."""
    json: bool = False
    """Print the results as JSON."""


def run(arguments: list[str]) -> int:
    options = parse(Reproduce, arguments, "reproduce")
    index, _, count = options.shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"shard must be i/n with 1 <= i <= n, got {options.shard!r}")
    from tra.experiments import Request, load_experiment

    experiment = load_experiment(options.name)
    scale = options.scale or experiment.usual_scale
    folder = options.output or Path("runs") / f"{Path(options.name).stem}-{scale}"
    command = shlex.join(["tra", "reproduce", *arguments])
    request = Request(
        folder=folder,
        scale=scale,
        seeds=options.seeds,
        attention=options.attention,
        columns=options.columns,
        jobs=options.jobs,
        shard=(int(index), int(count)),
        train=options.train,
        cluster=options.cluster,
        cluster_options=options.cluster_options,
        formats=options.figures,
        style=options.style,
        join=options.join,
        command=command,
    )
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
        print(folder)
    return 1 if outcome.failures else 0

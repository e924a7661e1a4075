"""Many runs: the contract of an experiment, the grid, and one file per table or figure of the paper."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tra import plugins
from tra.experiments.base import Experiment, Outcome, Row, Tuning, sweep
from tra.experiments.perform import Request
from tra.lookup import lookup

BUILT_IN = {
    "demo": "tra.experiments.demo:DEMO",
    "table1": "tra.experiments.table1:TABLE1",
    "aids": "tra.experiments.aids:AIDS",
    "steps": "tra.experiments.steps:STEPS",
    "norms": "tra.experiments.norms:NORMS",
    "longer": "tra.experiments.longer:LONGER",
    "passkey": "tra.experiments.passkey:PASSKEY",
    "figure1": "tra.experiments.figure1:FIGURE1",
    "figure2": "tra.experiments.figure2:FIGURE2",
    "figure3": "tra.experiments.figure3:FIGURE3",
    "cost": "tra.experiments.cost:COST",
}
"""Where each is found; none is imported before it is wanted."""


class Reproducible(Protocol):
    """What `tra reproduce` can make: an :class:`Experiment`, or anything else with these."""

    @property
    def usual_scale(self) -> str: ...

    def perform(self, request: Request) -> Outcome: ...

    def plan(self, request: Request) -> Any: ...


def load_experiment(name: str) -> Reproducible:
    """An experiment by its name, or the one called ``experiment`` in a file of one's own, which is a plug-in too."""
    if name.endswith(".py"):
        module = plugins.load(name)
        found = getattr(module, "experiment", None)
        if not isinstance(found, Experiment):
            raise ValueError(f"{name} must define an Experiment called experiment, got {type(found).__name__}")
        return found
    place, _, attribute = lookup(BUILT_IN, name, "name").partition(":")
    return getattr(importlib.import_module(place), attribute)


def reproduce(
    experiment: "Experiment | Reproducible | str",
    folder: Path | str,
    *,
    scale: str | None = None,
    seeds: int | None = None,
    attention: Sequence[str] = (),
    columns: Sequence[str] = (),
    jobs: int = 1,
    shard: tuple[int, int] = (1, 1),
    train: bool = True,
    cluster: str | None = None,
    cluster_options: Mapping[str, Any] | None = None,
    figures: Sequence[str] = ("png",),
    style: str | None = None,
    command: str = "",
) -> Outcome:
    """Run what is missing of an experiment and write its tables and figures; the same call goes on after a stop.

    Args:
        experiment: one of the paper's by name, the path of a file that defines ``experiment``, or an Experiment.
        folder: where runs, results, tables and figures go.
        scale: one of the experiment's; "small" by default.
        seeds: runs of each kind.
        attention: rows or mechanisms; all of the experiment by default.
        columns: those to run and to show; all of the experiment by default.
        jobs: runs at the same time.
        shard: this machine's part of the runs, of how many.
        train: False makes tables and figures from what is stored.
        cluster: "slurm" or "local", to run as jobs through submitit.
        cluster_options: its parameters.
        figures: formats: "png", "svg", "pdf".
        style: a style sheet of matplotlib.
        command: what to write down as the way to repeat it.

    Returns:
        The finished runs, what they measured, and why others failed.
    """
    wanted = load_experiment(experiment) if isinstance(experiment, str) else experiment
    request = Request(
        Path(folder),
        scale or wanted.usual_scale,
        seeds,
        attention=(attention,) if isinstance(attention, str) else tuple(attention),
        columns=(columns,) if isinstance(columns, str) else tuple(columns),
        jobs=jobs,
        shard=shard,
        train=train,
        cluster=cluster,
        cluster_options=dict(cluster_options or {}),
        formats=(figures,) if isinstance(figures, str) else tuple(figures),
        style=style,
        command=command,
    )
    return wanted.perform(request)


__all__ = [
    "Experiment",
    "Outcome",
    "Request",
    "Row",
    "Tuning",
    "load_experiment",
    "reproduce",
    "sweep",
]

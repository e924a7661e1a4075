"""Many runs: the contract of an experiment, the grid, and one file per table or figure of the paper."""

import importlib
from pathlib import Path
from typing import Any

from tra import plugins
from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.request import Request
from tra.experiments.rows import Row, sweep
from tra.experiments.tuning import Tuning
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
}
"""Where each is found; none is imported before it is wanted."""


def load_experiment(name: str) -> Experiment:
    """An experiment of the paper by its name, or the one called ``experiment`` in a file, which is also a plug-in."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ValueError(f"an experiment must be a name or a file that exists, got {name}")
        module = plugins.load(name)
        found = getattr(module, "experiment", None)
        if not isinstance(found, Experiment):
            got = "none" if found is None else type(found).__name__
            raise ValueError(f"{name} must define an Experiment called experiment, got {got}")
        return found
    if name == "cost":
        raise ValueError("name must be an experiment, and cost is a benchmark: tra bench --cost")
    place, _, attribute = lookup(BUILT_IN, name, "name").partition(":")
    return getattr(importlib.import_module(place), attribute)


def reproduce(experiment: Experiment | str, folder: Path | str | None = None, **asked: Any) -> Outcome:
    """Run what is missing of an experiment and write its tables and figures; the same call goes on after a stop.

    Args:
        experiment: one of the paper's by name, the path of a file that defines ``experiment``, or an Experiment.
        folder: where runs, results, tables and figures go; by default that of the command, ``runs/NAME-SCALE``, which
            an Experiment without a name does not have.
        asked: the other fields of :class:`Request`, which are the options of the command.

    Returns:
        The finished runs, what they measured, and why others failed.
    """
    name = Path(experiment).stem if isinstance(experiment, str) else None
    wanted = load_experiment(experiment) if isinstance(experiment, str) else experiment
    place = None if folder is None else Path(folder)
    return wanted.perform(Request(place, **asked).for_experiment(name, wanted.usual_scale))


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

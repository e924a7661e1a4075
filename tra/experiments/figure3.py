"""The paper's third figure: attention of a trained TRA language model, white where it is exactly null.

In the folder of the second figure it finds its run there.
"""

from functools import lru_cache
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from tra.errors import RunError
from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.figure2 import FIGURE2
from tra.report.figures import attention_heatmap
from tra.report.inspection import Head, heads_table, inspect_heads
from tra.report.tables import Table
from tra.runs import Run
from tra.tasks import ReadsText

TEXT = (
    "The river rises in the northern hills and flows south through the old town . "
    "In the spring of 1847 the river flooded the town , and the people moved to the northern hills ."
)


@lru_cache(maxsize=1)
def _inspected(folder: Path) -> tuple[list[Head], list[Tensor], list[str]]:
    """A run's heads and weights on the same sentences as always, and their tokens."""
    run = Run(folder)
    assert isinstance(run.task, ReadsText)
    tokens, symbols = run.task.read(TEXT)
    return *inspect_heads(run.model, tokens), symbols


def _tables(outcome: Outcome) -> list[Table]:
    if not outcome.cells:
        raise RunError("heads are those of a run that is here, and there is none: leave out --join")
    return [heads_table(_inspected(outcome.cells[0].folder)[0])]


def _figures(outcome: Outcome) -> dict[str, Figure]:
    _, weights, symbols = _inspected(outcome.cells[0].folder)
    return {"attention": attention_heatmap({outcome.cells[0].row: weights}, symbols)}


FIGURE3 = Experiment(
    scales=FIGURE2.scales,
    rows=("tra",),
    seeds=1,
    tuning=FIGURE2.tuning,
    at_scale={scale: {**changes, "seeds": 1} for scale, changes in FIGURE2.at_scale.items()},
    tables=_tables,
    figures=_figures,
    stem="figure3",
)

"""Flip-flop with and without QK-norm: both are seen, whichever tuning would take.

Within the training length both can come to a loss of nearly nothing, so that which of them is lower says little of what
lies past it. Here the learning rate alone is tuned.
"""

from dataclasses import replace

from tra.experiments.experiment import Experiment
from tra.experiments.rows import Row
from tra.experiments.table1 import TABLE1

assert TABLE1.tuning is not None
COMPARED = ("tra", "stick-breaking", "fot", "selective", "alibi", "rope", "tra-distance-only", "tra-ordinary-distance")

NORMS = Experiment(
    scales={scale: {"flip_flop": TABLE1.scales[scale]["flip_flop"]} for scale in ("smoke", "small")},
    rows=tuple(Row(name, {"qk_norm": norm}) for name in COMPARED for norm in (True, False)),
    seeds=3,
    tuning=replace(TABLE1.tuning, grid={"learning_rate": TABLE1.tuning.grid["learning_rate"]}),
    at_scale={"smoke": {"tuning": None}},
)

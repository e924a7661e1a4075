"""Perplexity against training steps: does what the threshold costs at first vanish?"""

from tra.experiments.base import Experiment, sweep
from tra.experiments.figure2 import FIGURE2

STEPS = Experiment(
    scales={scale: FIGURE2.scales[scale] for scale in ("smoke", "small")},
    rows=sweep(("tra", "tra-distance-only", "fot"), {"steps": (600, 1200, 2400, 4800)}),
    tuning=FIGURE2.tuning,
    at_scale={"smoke": {"tuning": None}},
)

"""A key in noise: trained at 32 tokens, asked for at up to 16,384. What a long window is good for."""

from tra.experiments.experiment import Experiment
from tra.experiments.figure2 import FIGURE2
from tra.experiments.scales import shrunk
from tra.experiments.table1 import TABLE1
from tra.recipes import RECIPES, Evaluation, Recipe
from tra.tasks import build_task

SEQUENCES = {32: 256, 128: 128, 1024: 64, 4096: 32, 16_384: 4}
"""Test sequences at each length: mechanisms that visit every key take minutes for the longest."""


def passkey(attention: str = "tra") -> Recipe:
    """The small flip-flop model, at half its length and with more steps: gates that forget are slow to look back."""
    return RECIPES["flip-flop-small"](attention=attention).changed(
        {
            "name": "passkey",
            "task": "passkey",
            "model.vocabulary": build_task("passkey").vocabulary,
            "length": 32,
            "steps": 1500,
            "evaluations": tuple(Evaluation("passkey", length, number) for length, number in SEQUENCES.items()),
        }
    )


PASSKEY = Experiment(
    scales={"smoke": {"passkey": shrunk(passkey)}, "small": {"passkey": passkey}},
    rows=FIGURE2.rows,
    seeds=3,
    tuning=TABLE1.tuning,
    at_scale={"smoke": {"tuning": None}},
)

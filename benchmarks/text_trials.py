"""Trials on text at the setting that tuning chose for tra-learned: TRA in every second layer, TRA that counts scores.

    tra reproduce benchmarks/text_trials.py --plugin benchmarks/score_distance.py --output runs/text-trials

Nothing is tuned here. Runs are in float32, which on processors without bfloat16 takes half the time; the first row is
measured by the protocol in bfloat16 in figure2, and says here what the precision changes.
"""

from tra.experiments import Experiment, Row
from tra.experiments.figure2 import whole_text
from tra.recipes import Evaluation, Recipe
from tra.report.tables import comparison_tables, difference_table

WITHOUT_NORM = {"qk_norm": False}
SHORT = {"evaluations": (Evaluation("valid", 128, None),)}
"""What is dense is measured in the window of training alone."""
CONTROL = Row("tra-learned", WITHOUT_NORM, name="tra-learned")


def text(attention: str = "tra-learned") -> Recipe:
    """The text of figure2, with the rate that tuning chose for every mechanism there."""
    return whole_text(attention).changed({"learning_rate": 6e-3, "precision": "no"})


experiment = Experiment(
    scales={"small": {"wikitext103": text}},
    rows=(
        CONTROL,
        Row("rope+tra-learned", WITHOUT_NORM, name="rope+tra-learned"),
        Row("tra-score-distance", {**WITHOUT_NORM, "learned_threshold": True}, SHORT, name="tra-score-distance"),
        Row("nope+tra-learned", WITHOUT_NORM, name="nope+tra-learned"),
    ),
    tables=lambda outcome: [
        *difference_table(outcome.records, CONTROL.label, "perplexity"),
        *comparison_tables(outcome.records),
    ],
)

"""Text read by TRA whose heads learn their thresholds, beside a threshold fixed at 0, at settings tuned for the latter.

Both start from the same weights and see the same sequences; only the threshold differs. With settings of their own the
two are rows of the other experiments.
"""

from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.figure2 import whole_text
from tra.experiments.scales import shrunk_text
from tra.experiments.table1 import AIDED
from tra.recipes import Recipe
from tra.report.tables import Table, comparison_tables, difference_table

TUNED = {"learning_rate": 6e-3, "model.attention_options.qk_norm": False}
"""What tuning chose for the threshold fixed at 0."""


def as_tuned(attention: str = "tra") -> Recipe:
    return whole_text(attention=attention).changed(TUNED)


def _tables(outcome: Outcome) -> list[Table]:
    return [*difference_table(outcome.records, AIDED.label, "perplexity"), *comparison_tables(outcome.records)]


LEARNED = Experiment(
    scales={"smoke": {"wikitext103": shrunk_text(as_tuned)}, "small": {"wikitext103": as_tuned}},
    rows=("tra-learned", AIDED),
    seeds=3,
    tables=_tables,
)

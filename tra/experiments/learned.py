"""TRA whose heads learn their thresholds, beside a threshold fixed at 0, at the settings tuned for the latter.

Both start from the same weights and see the same sequences; only the threshold differs. A learned threshold with
settings of its own may do better.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.figure2 import whole_text
from tra.experiments.passkey import passkey
from tra.experiments.scales import shrunk, shrunk_text
from tra.experiments.table1 import AIDED, SMALL_SCALE
from tra.recipes import Recipe, RecipeOf
from tra.report.tables import Table, comparison_tables, difference_table

TEXT = "wikitext103"


class Settings(NamedTuple):
    """What tuning chose for a column."""

    recipe_of: RecipeOf
    learning_rate: float
    qk_norm: bool


SETTINGS: Mapping[str, Settings] = {
    TEXT: Settings(whole_text, 6e-3, False),
    "flip_flop": Settings(SMALL_SCALE["flip_flop"], 2e-3, False),
    "recall": Settings(SMALL_SCALE["recall"], 2e-3, True),
    "passkey": Settings(passkey, 2e-3, True),
    "induct_once": Settings(SMALL_SCALE["induct_once"], 1e-3, True),
    "copy_unique": Settings(SMALL_SCALE["copy_unique"], 1e-3, True),
}


def _as_tuned(settings: Settings, attention: str = "tra") -> Recipe:
    options = {"learning_rate": settings.learning_rate, "model.attention_options.qk_norm": settings.qk_norm}
    return settings.recipe_of(attention=attention).changed(options)


def _tables(outcome: Outcome) -> list[Table]:
    text = [record for record in outcome.records if record.column == TEXT]
    return [*difference_table(text, AIDED.label, "perplexity"), *comparison_tables(outcome.records)]


COLUMNS: Mapping[str, RecipeOf] = {column: partial(_as_tuned, settings) for column, settings in SETTINGS.items()}

LEARNED = Experiment(
    scales={
        "smoke": {
            column: shrunk_text(recipe_of) if column == TEXT else shrunk(recipe_of)
            for column, recipe_of in COLUMNS.items()
        },
        "small": COLUMNS,
    },
    rows=("tra-learned", AIDED),
    seeds=3,
    tables=_tables,
)

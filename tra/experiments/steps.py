"""Perplexity against training steps: does what the threshold costs at first vanish?

The first column is that of figure2, whose results can be joined; the settings that are tuned on it serve the others.
"""

from dataclasses import replace

from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.figure2 import FIGURE2, whole_text
from tra.experiments.scales import shrunk_text
from tra.experiments.table1 import AIDED
from tra.recipes import Recipe, RecipeOf
from tra.report.figures import perplexity_by_steps
from tra.report.tables import Table, comparison_tables, difference_table

FIRST = "wikitext103"
STEPS_OF = {FIRST: 600, "1200_steps": 1200, "2400_steps": 2400, "4800_steps": 4800}


def _trained_for(steps: int) -> RecipeOf:
    def recipe(attention: str = "tra") -> Recipe:
        return replace(whole_text(attention), name=f"wikitext103-narrow-{steps}", steps=steps)

    return recipe


def _tables(outcome: Outcome) -> list[Table]:
    """How much each mechanism differs from TRA after so many steps, then everything."""
    differences = []
    for column, steps in STEPS_OF.items():
        records = [record for record in outcome.records if record.column == column and not record.result.stride]
        differences += [
            replace(table, title=f"{table.title} after {steps:,} steps")
            for table in difference_table(records, "tra", "perplexity")
        ]
    return [*differences, *comparison_tables(outcome.records)]


COLUMNS = {column: whole_text if column == FIRST else _trained_for(steps) for column, steps in STEPS_OF.items()}
assert FIGURE2.tuning is not None

STEPS = Experiment(
    scales={
        "smoke": {column: shrunk_text(recipe_of) for column, recipe_of in COLUMNS.items()},
        "small": COLUMNS,
    },
    rows=("tra", AIDED, "tra-learned", "tra-distance-only", "fot", "stick-breaking"),
    tuning=replace(FIGURE2.tuning, column=FIRST),
    at_scale={"smoke": {"tuning": None}},
    tables=_tables,
    figures=lambda outcome: {"steps": perplexity_by_steps(outcome.records, STEPS_OF)},
)

"""The demonstration: TRA and RoPE learn to remember one bit over 64 tokens, and are asked at up to 64 times that."""

from dataclasses import replace

from matplotlib.figure import Figure

from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.figure1 import heatmaps
from tra.experiments.scales import shrunk
from tra.recipes import RECIPES, Recipe
from tra.report.figures import measure_by_length
from tra.report.records import grouped
from tra.report.tables import Table, by_length_table

HEATMAP_TOKENS = 48


def _tables(outcome: Outcome) -> list[Table]:
    """Exact match by length, and in how many seeds everything is right."""
    tables = [by_length_table(outcome.records)]
    if len({record.seed for record in outcome.records}) > 1:
        rows = []
        for row, some in grouped(outcome.records, lambda record: record.row).items():
            seeds = grouped(some, lambda record: record.seed).values()
            perfect = sum(all(record.result.value == 1.0 for record in seed) for seed in seeds)
            rows.append([row, f"{perfect} of {len(seeds)}", f"{min(record.result.value for record in some):.3f}"])
        headings = ("attention", "seeds without an error on any set", "least exact match")
        tables.append(Table(headings, rows, "Seed by seed"))
    return tables


def _figures(outcome: Outcome) -> dict[str, Figure]:
    figures = {"accuracy": measure_by_length(outcome.records)}
    first = [cell for cell in outcome.cells if cell.row == outcome.cells[0].row]
    if first:
        figures["attention"] = heatmaps(Outcome(first, outcome.records), HEATMAP_TOKENS)
    return figures


def quick(attention: str = "tra") -> Recipe:
    """The small recipe, measured on a quarter of its sequences: `tra demo` is to end soon."""
    recipe = RECIPES["flip-flop-small"](attention=attention)
    fewer = tuple(replace(entry, examples=(entry.examples or 0) // 4) for entry in recipe.evaluations)
    return replace(recipe, evaluations=fewer)


DEMO = Experiment(
    scales={
        "quick": {"flip_flop": quick},
        "smoke": {"flip_flop": shrunk(RECIPES["flip-flop-small"])},
        "small": {"flip_flop": RECIPES["flip-flop-small"]},
    },
    rows=("tra", "rope"),
    tables=_tables,
    figures=_figures,
)

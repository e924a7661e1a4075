"""The paper's second figure: perplexity of WikiText-103 in windows longer than those trained on."""

from dataclasses import replace

from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.scales import shrunk_text
from tra.experiments.table1 import AIDED, FIXED_THETA, ROPE, protocol
from tra.recipes import RECIPES, Evaluation, Recipe
from tra.report.figures import perplexity_by_window
from tra.report.tables import Table, comparison_tables, difference_table


def whole_text(attention: str = "tra") -> Recipe:
    """The small recipe at half the width and for half the steps, in bfloat16, measured on the whole validation text."""
    recipe = RECIPES["wikitext103-small"](attention=attention)
    return replace(
        recipe,
        name="wikitext103-narrow",
        model=replace(recipe.model, width=128),
        steps=600,
        precision="bf16",
        evaluations=tuple(Evaluation("valid", window, None) for window in (128, 1024, 4096)),
    )


def _tables(outcome: Outcome) -> list[Table]:
    """Perplexity, and first how much each mechanism differs from TRA."""
    side_by_side = [record for record in outcome.records if not record.result.stride]
    return [*difference_table(side_by_side, "tra", "perplexity"), *comparison_tables(outcome.records)]


FIGURE2 = Experiment(
    scales={
        "smoke": {"wikitext103": shrunk_text(whole_text)},
        "small": {"wikitext103": whole_text},
        "paper": {"wikitext103": RECIPES["wikitext103"]},
    },
    rows=(
        *("tra", AIDED, "tra-learned", "tra-distance-only", "fot", "alibi"),
        *(ROPE, FIXED_THETA[0], "cope", "stick-breaking", "selective", "nape", "ssmax", "asentmax"),
    ),
    seeds=3,
    tuning=protocol(1.5e-3, 3e-3, 6e-3),
    at_scale={"smoke": {"tuning": None}, "paper": {"seeds": 4, "tuning": protocol(1e-4, 3e-4, 1e-3)}},
    tables=_tables,
    figures=lambda outcome: {"perplexity": perplexity_by_window(outcome.records)},
)

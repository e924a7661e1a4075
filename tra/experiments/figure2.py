"""The paper's second figure: perplexity of WikiText-103 in windows longer than those trained on."""

from tra.experiments.base import Experiment
from tra.experiments.scales import shrunk_text
from tra.recipes import RECIPES
from tra.report.figures import perplexity_by_window

SMALL = RECIPES["wikitext103-small"]

FIGURE2 = Experiment(
    scales={
        "smoke": {"wikitext103": shrunk_text(SMALL)},
        "small": {"wikitext103": SMALL},
        "paper": {"wikitext103": RECIPES["wikitext103"]},
    },
    rows=("tra", "rope", "nope", "alibi", "fot", "cope"),
    seeds=2,
    figures=lambda outcome: {"perplexity": perplexity_by_window(outcome.records)},
)

"""The paper's second figure: perplexity of WikiText-103 in windows longer than those trained on."""

from tra.experiments.base import Experiment
from tra.experiments.scales import shrunk_text
from tra.experiments.table1 import protocol
from tra.recipes import RECIPES
from tra.report.figures import perplexity_by_window

SMALL = RECIPES["wikitext103-small"]

FIGURE2 = Experiment(
    scales={
        "smoke": {"wikitext103": shrunk_text(SMALL)},
        "small": {"wikitext103": SMALL},
        "paper": {"wikitext103": RECIPES["wikitext103"]},
    },
    rows=("tra", "tra-distance-only", "fot", "alibi", "rope", "cope", "stick-breaking"),
    seeds=3,
    tuning=protocol(1.5e-3, 3e-3, 6e-3),
    at_scale={"smoke": {"tuning": None}, "paper": {"seeds": 4, "tuning": protocol(1e-4, 3e-4, 1e-3)}},
    figures=lambda outcome: {"perplexity": perplexity_by_window(outcome.records)},
)

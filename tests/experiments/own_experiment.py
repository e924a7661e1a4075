"""An experiment of one's own, in a file that also brings a mechanism and a task."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tra.attention.base import Attention, Context, causal_softmax_attention, distances
from tra.experiments import Experiment, Row, Tuning
from tra.experiments.table1 import SMOKE
from tra.recipes import Evaluation, Recipe
from tra.tasks import FlipFlop


class RecentAttention(Attention):
    """Softmax attention whose scores fall with distance at one slope for all heads."""

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, slope: float = 0.1, **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.slope = slope

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        bias = -self.slope * distances(query, key)
        dropout = self.active_dropout(context)
        return causal_softmax_attention(query, key, value, context, dropout=dropout, bias=bias[None])


@dataclass(frozen=True)
class RareFlipFlop(FlipFlop):
    """Flip-flop whose writes are rare."""

    name = "rare_flip_flop"
    ignore: float = 0.9


MECHANISMS = {"recent": RecentAttention}
TASKS = {"rare_flip_flop": RareFlipFlop}


def rare(attention: str = "tra") -> Recipe:
    evaluations = (Evaluation("iid", 8, 4), Evaluation("iid", 16, 4))
    return replace(SMOKE["flip_flop"](attention=attention), task="rare_flip_flop", evaluations=evaluations)


experiment = Experiment(
    scales={"tiny": {"rare": rare}},
    rows=("tra", Row("recent", {"slope": 0.5})),
    tuning=Tuning({"learning_rate": (1e-3, 1e-2)}, rows=("recent slope=0.5",)),
)

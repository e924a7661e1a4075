"""A trial: TRA whose distance counts each kept key by its score instead of by one, as a plug-in.

    tra train induct-recent-small --plugin benchmarks/score_distance.py --model.attention tra-score-distance
    ... --model.options base=1 slope=0     # the count, as TRA has it
    tra reproduce benchmarks/text_trials.py --plugin benchmarks/score_distance.py     # on text

Dense, so for short sequences. A key that matches the query well pushes what lies behind it far away, as stick-breaking
does; keys that barely pass the threshold hardly count. Weights of keys that are left out stay exactly 0.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tra.attention.base import Context
from tra.attention.dense import dense_mix, dense_scores, sum_from_right
from tra.attention.gate import GatedAttention
from tra.attention.threshold_relative import THRESHOLD_RATE


class ScoreDistanceAttention(GatedAttention):
    """Softmax of s + g d over the keys with a positive score s; d sums ``base + slope * s`` over the nearer ones.

    Args:
        base: what a kept key adds to the distance whatever its score; with 1 or more the certified stop would hold.
        slope: what its score adds.
        straight_through: temperature of the gradients that pass the threshold.
        learned_threshold: each head learns its threshold, from 0 on, as in `tra-learned`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        base: float = 0.0,
        slope: float = 1.0,
        straight_through: float = 0.5,
        learned_threshold: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.base, self.slope, self.straight_through = base, slope, straight_through
        self.threshold_bias = nn.Parameter(torch.zeros(heads)) if learned_threshold else None

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        score = dense_scores(query, key, context)
        visible = context.visible(query, key)
        margin = score
        if self.threshold_bias is not None:
            margin = score - (THRESHOLD_RATE * self.threshold_bias)[:, None, None]
        kept = visible & (margin > 0)
        soft = torch.sigmoid(margin / self.straight_through)
        member = (kept + soft - soft.detach()) * visible
        step = member * (self.base + self.slope * margin.relu())
        distance = sum_from_right(step) - step
        logits = score + self.log_gate(x).to(score.dtype)[..., None] * distance
        among = kept | ~kept.any(-1, keepdim=True)  # a row that keeps nothing is compared with its visible keys
        largest = logits.detach().masked_fill(~(among & visible), float("-inf")).amax(-1, keepdim=True)
        weights = member * (logits - largest).clamp(max=5.0).masked_fill(~visible, -80.0).exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.where(kept.any(-1, keepdim=True), torch.ones_like(total))
        return dense_mix(weights, value, self.active_dropout(context))


MECHANISMS = {"tra-score-distance": ScoreDistanceAttention}

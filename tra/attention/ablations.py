"""Ablations: TRA with one of its parts removed."""

from typing import Any

from torch import Tensor

from tra.attention.base import Context, distances
from tra.attention.dense import dense_mix, dense_scores, dense_softmax
from tra.attention.gate import GatedAttention, linear_gate
from tra.attention.threshold_relative import KEEPS_ALL, OperatorAttention


class ThresholdOnlyAttention(OperatorAttention):
    """The threshold without a distance: softmax over the keys that pass it."""

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, threshold: float = 0.0, **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.threshold = threshold
        # Made and dropped: from the same seed everything else starts as it does beside TRA.
        linear_gate(width, heads, None)

    def log_gate(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], self.heads, x.shape[1])


class DistanceOnlyAttention(GatedAttention, OperatorAttention):
    """The gated distance without a threshold: every key is kept, so distance counts all tokens."""

    threshold = KEEPS_ALL


class OrdinaryDistanceAttention(GatedAttention):
    """The threshold with the ordinary distance: it counts all tokens, kept or not."""

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, threshold: float = 0.0, **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.threshold = threshold

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        scores = dense_scores(query, key, context)
        kept = context.visible(query, key) & (scores > self.threshold)
        logits = scores + self.log_gate(x).to(scores.dtype)[..., None] * (distances(query, key) + 1)
        return dense_mix(dense_softmax(logits, kept), value, self.active_dropout(context))

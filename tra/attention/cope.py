"""CoPE: contextual position encoding (Golovneva et al. 2024, arXiv 2405.18719).

As in the paper's listing, gates read the scaled score and the position's term is not scaled; the authors' repository
can divide that term by sqrt(D) too.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tra.attention.base import Attention, Context
from tra.attention.dense import dense_mix, dense_scores, dense_softmax, full_product, sum_from_right


class ContextualPositionAttention(Attention):
    """Softmax attention whose positions are sums of gates, which are computed from the scores.

    The position of key j seen from query i is the sum of sigmoid(s) over the keys from j to i, no more than
    ``positions - 1``. The score gains query . e, with the embedding e of the position interpolated between the
    whole numbers beside it. Takes the arguments of :class:`~tra.attention.base.Attention`, and ``positions``, the
    number of embeddings (npos_max), which the heads share.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, positions: int = 64, **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if positions < 1:
            raise ValueError(f"positions must be at least 1, got {positions}")
        self.embedding = nn.Parameter(torch.zeros(self.head_width, positions))

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        visible = context.visible(query, key)
        scores = dense_scores(query, key, context)
        position = sum_from_right(scores.sigmoid().masked_fill(~visible, 0.0))
        position = position.clamp(max=self.embedding.shape[1] - 1)
        below = position.floor()
        by_position = full_product(query, self.embedding)
        at_below, at_above = (by_position.gather(-1, whole.long()) for whole in (below, position.ceil()))
        logits = scores + torch.lerp(at_below, at_above, position - below)
        return dense_mix(dense_softmax(logits, visible), value, self.active_dropout(context))

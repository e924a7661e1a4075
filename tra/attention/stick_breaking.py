"""Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980)."""

import torch.nn.functional as F
from torch import Tensor

from tra.attention.base import Attention, Context, distances
from tra.attention.dense import dense_mix, dense_scores, sum_from_right


class StickBreakingAttention(Attention):
    """Going back from the query, each key takes a share sigmoid(s) of what the keys nearer to it have left.

    A query does not see its own token. The share that no key takes is dropped, as in the paper's equation, so weights
    need not sum to 1.
    """

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        visible = context.visible(query, key) & (distances(query, key) != 0)
        scores = dense_scores(query, key, context)
        log_left = F.logsigmoid(-scores).masked_fill(~visible, 0.0)
        log_weights = F.logsigmoid(scores) + sum_from_right(log_left) - log_left
        return dense_mix(log_weights.exp().masked_fill(~visible, 0.0), value, self.active_dropout(context))

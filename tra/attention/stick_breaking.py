"""Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980)."""

import torch.nn.functional as F
from torch import Tensor

from tra.attention.base import Attention, distances, remember
from tra.attention.cache import Cache
from tra.attention.dense import dense_mix, dense_scores, sum_from_right
from tra.ops.visibility import visible_keys


class StickBreakingAttention(Attention):
    """Going back from the query, each key takes a share sigmoid(s) of what the keys nearer to it have left.

    A query does not see its own token, and what no key takes is lost, as in the paper's equation: weights need not
    sum to 1.
    """

    def attend(
        self,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cache: Cache | None,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
    ) -> Tensor:
        key, value = remember(cache, key, value)
        queries, keys = query.shape[2], key.shape[2]
        visible = visible_keys(queries, keys, key_mask, segment_ids, query.device)
        visible = visible & (distances(queries, keys, query.device) != 0)
        scores = dense_scores(query, key)
        log_left = F.logsigmoid(-scores).masked_fill(~visible, 0.0)
        log_weights = F.logsigmoid(scores) + sum_from_right(log_left) - log_left
        return dense_mix(log_weights.exp().masked_fill(~visible, 0.0), value, self.active_dropout)

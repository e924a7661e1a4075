"""Selective attention (Leviathan et al. 2024, arXiv 2410.02703), with RoPE for positions (ours)."""

import torch
from torch import Tensor

from tra.attention.base import Context, distances
from tra.attention.dense import dense_mix, dense_scores, dense_softmax
from tra.attention.rope import RotaryAttention, rotate


class SelectiveAttention(RotaryAttention):
    """Softmax attention in which a token can mask earlier tokens for all later ones.

    The positive scores of the first head are how much the query's token masks the key. The scores of all heads lose
    the sum of this over the tokens between key and query. No token masks itself or the first of its document.
    Takes the arguments of :class:`~tra.attention.rope.RotaryAttention`.
    """

    uses_sdpa = False
    takes_static_cache = False
    revises_cache = True

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        turn = self.turn(x, context)
        query, key = rotate(query, *turn), rotate(key, *turn)
        # How much the tokens so far mask each key; none has masked the new ones.
        dtype = torch.promote_types(query.dtype, torch.float32)
        masked = torch.zeros(query.shape[0], 1, query.shape[2], dtype=dtype, device=query.device)
        key, value, masked = context.remember(key, value, masked)
        visible = context.visible(query, key)
        scores = dense_scores(query, key, context)

        can_mask = visible & (distances(query, key) != 0) & (visible.cumsum(dim=-1) != 1)
        if context.key_mask is not None:  # padding masks nothing
            can_mask = can_mask & context.key_mask[:, None, key.shape[2] - query.shape[2] :, None]
        masks = scores[:, :1].relu().masked_fill(~can_mask, 0.0)
        until_query = masked[:, :, None] + masks.cumsum(dim=-2) - masks
        if context.cache is not None:
            masked += masks.sum(dim=-2)  # in the cache
        return dense_mix(dense_softmax(scores - until_query, visible), value, self.active_dropout(context))

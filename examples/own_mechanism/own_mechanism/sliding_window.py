"""Sliding-window attention: a token sees itself and the few before it."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tra.attention import Attention, Context
from tra.attention.base import distances


class SlidingWindowAttention(Attention):
    """Softmax attention over the last ``window`` tokens, without positions, on PyTorch's SDPA."""

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, *, window: int = 16, **shared: Any) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.window = window

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        visible = context.visible(query, key) & (distances(query, key) < self.window)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            dropout_p=self.active_dropout(context),
            enable_gqa=query.shape[1] != key.shape[1],
        )

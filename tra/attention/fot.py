"""FoT: the forgetting transformer (Lin et al. 2025, arXiv 2503.02130) on PyTorch's SDPA."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.base import Attention, causal_softmax_attention, remember
from tra.attention.cache import Cache


class ForgettingAttention(Attention):
    """Softmax attention in which every token makes each head forget a share of all that came before it.

    The score of query i and key j gains the sum of log f_l over the tokens l after j up to i, where
    f = sigmoid(w . x + b), one for each head.
    """

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, **shared: Any) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.gate = nn.Linear(width, heads)

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
        gate = self.gate(x)
        log_forget = F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32))).transpose(1, 2)
        key, value, log_forget = remember(cache, key, value, log_forget)
        if key_mask is not None:
            log_forget = log_forget.masked_fill(~key_mask[:, None], 0.0)
        # A difference of running sums: in float32 a sum over 100,000 tokens would leave it three digits.
        forgotten = log_forget.to(torch.float32 if x.device.type == "mps" else torch.float64).cumsum(dim=-1)
        bias = forgotten[:, :, -query.shape[2] :, None] - forgotten[:, :, None, :]
        return causal_softmax_attention(
            query,
            key,
            value,
            key_mask=key_mask,
            segment_ids=segment_ids,
            dropout=self.active_dropout,
            bias=bias.to(x.dtype),
        )

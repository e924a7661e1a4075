"""SSMax: scalable softmax (Nakanishi 2025, arXiv 2501.19399), with NAPE for positions or without any.

In the form of Vasylenko et al. 2025 (arXiv 2506.16640): the logarithm is of one more than the keys that a query sees,
so that it is never 0, and with NAPE only the heads without positions are scaled.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tra.attention.alibi import linear_bias
from tra.attention.base import Attention, Context, causal_softmax_attention
from tra.attention.nape import Positions, half_slopes, scale_last_heads
from tra.attention.positions import log_positions


class ScalableSoftmaxAttention(Attention):
    """Softmax attention whose scores grow with the number n of keys: s becomes b s log(n + 1), with b learned per head.

    So weights stay as sharp among many keys as among few. Takes the arguments of
    :class:`~tra.attention.base.Attention`, and:

    Args:
        positions: "nape" or "none".
    """

    uses_sdpa = True
    slopes: Tensor

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, positions: Positions = "nape", **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        slopes = half_slopes(heads, positions)
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)
        self.positions = positions
        self.length_scale = nn.Parameter(torch.ones(slopes.count(0.0)))
        """b of each head without positions."""

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        dropout = self.active_dropout(context)
        query = scale_last_heads(query, self.length_scale[:, None] * log_positions(query, key, context))
        bias = None if self.positions == "none" else linear_bias(self.slopes)
        return causal_softmax_attention(query, key, value, context, dropout=dropout, bias=bias)

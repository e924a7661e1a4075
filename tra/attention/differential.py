"""Differential attention (Ye et al. 2024, arXiv 2410.05258): RoPE and PyTorch's SDPA, twice.

As published, lambda starts at 0.8 - 0.6 exp(-0.3 l) in layer l, counted from 0: at 0.2 in the first, and near 0.8 in
deep ones. ``lambda_start`` makes it the same in every layer, which the authors report to do as well; version 0.1 of
this package had 0.8 everywhere.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tra.attention.base import Context, causal_softmax_attention
from tra.attention.rope import RotaryAttention, rotate


class DifferentialAttention(RotaryAttention):
    """The difference of two softmax attentions, one from each half of the query and key, to cancel what both see.

    Weights may be negative. The mixed values of each head are normalised. Takes the arguments of
    :class:`~tra.attention.rope.RotaryAttention`, and:

    Args:
        lambda_start: lambda, the factor on the second attention, at initialisation; by the layer's depth by default.
    """

    rotary_parts = 2

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, lambda_start: float | None = None, **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if lambda_start is None:  # as published, by depth
            lambda_start = 0.8 - 0.6 * math.exp(-0.3 * self.layer)
        if not 0.0 <= lambda_start < 1.0:
            raise ValueError(f"lambda_start must be in [0, 1), got {lambda_start!r}")
        self.lambda_start = lambda_start
        self.lambdas = nn.Parameter(torch.randn(2, 2, self.head_width // 2).mul_(0.1))
        """Query and key vector of each of the two attentions."""
        self.norm = nn.RMSNorm(self.head_width, eps=1e-5)

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        turn = self.turn(x, context)
        query, key = (torch.cat([rotate(half, *turn) for half in y.chunk(2, dim=-1)], dim=-1) for y in (query, key))
        key, value = context.remember(key, value)
        first, second = (
            causal_softmax_attention(half_query, half_key, value, context, dropout=self.active_dropout(context))
            for half_query, half_key in zip(query.chunk(2, dim=-1), key.chunk(2, dim=-1), strict=True)
        )
        added, taken = self.lambdas.prod(dim=1).sum(dim=-1).exp().unbind()
        return first - (added - taken + self.lambda_start).to(second.dtype) * second

    def postprocess(self, mixed: Tensor) -> Tensor:
        normed = self.norm(mixed.to(self.norm.weight.dtype)).to(mixed.dtype)
        return normed * (1.0 - self.lambda_start)

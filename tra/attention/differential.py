"""Differential attention (Ye et al. 2024, arXiv 2410.05258): RoPE and PyTorch's SDPA, twice.

The authors let lambda's starting value grow with depth, from 0.2 to 0.8; here it is 0.8 in every layer, one of the
constants that they report to do as well.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tra.attention.base import Attention, Context, causal_softmax_attention
from tra.attention.rope import rotate, rotation


class DifferentialAttention(Attention):
    """The difference of two softmax attentions, one from each half of the query and key, to cancel what both see.

    Weights may be negative. The mixed values of each head are normalised. Takes the arguments of
    :class:`~tra.attention.base.Attention`, and:

    Args:
        theta: the base of RoPE's wavelengths.
        lambda_start: lambda, the factor on the second attention, at initialisation.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        theta: float = 500_000.0,
        lambda_start: float = 0.8,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if self.head_width % 4:
            raise ValueError(f"width // heads must be a multiple of 4 for two rotary halves, got {self.head_width}")
        if not 0.0 <= lambda_start < 1.0:
            raise ValueError(f"lambda_start must be in [0, 1), got {lambda_start!r}")
        self.theta, self.lambda_start = theta, lambda_start
        self.lambdas = nn.Parameter(0.1 * torch.randn(2, 2, self.head_width // 2))
        """Query and key vector of each of the two attentions."""
        self.norm = nn.RMSNorm(self.head_width, eps=1e-5)

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        turn = rotation(context.cached, context.cached + x.shape[1], self.head_width // 2, self.theta)
        query, key = (torch.cat([rotate(half, *turn) for half in y.chunk(2, dim=-1)], dim=-1) for y in (query, key))
        key, value = context.remember(key, value)
        first, second = (
            causal_softmax_attention(half_query, half_key, value, context, dropout=self.active_dropout)
            for half_query, half_key in zip(query.chunk(2, dim=-1), key.chunk(2, dim=-1), strict=True)
        )
        added, taken = self.lambdas.prod(dim=1).sum(dim=-1).exp().unbind()
        return first - (added - taken + self.lambda_start).to(second.dtype) * second

    def finished(self, mixed: Tensor) -> Tensor:
        normed = self.norm(mixed.to(self.norm.weight.dtype)).to(mixed.dtype)
        return normed * (1.0 - self.lambda_start)

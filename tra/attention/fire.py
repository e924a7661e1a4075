"""FIRE: functional interpolation for relative positions (Li et al. 2024, arXiv 2310.04418) on PyTorch's SDPA.

Each layer learns its own function, and distance is divided by the position of the query, so that it stays in [0, 1]
whatever the length.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tra.attention.base import Attention, Context, causal_softmax_attention, distances
from tra.attention.positions import token_positions

SMALL = 1e-6


class InterpolatedBiasAttention(Attention):
    """Softmax attention with a bias f(psi(distance) / psi(max(L, position))), where psi(x) = log(c x + 1).

    f is an MLP with one hidden layer and a value for each head; c and L are learned. A position counts the tokens of
    the same document that are not padding. Takes the arguments of :class:`~tra.attention.base.Attention`, and:

    Args:
        hidden: units of the MLP.
        rate: c at the start.
        shortest: L at the start; for positions below it, the divisor is constant.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        hidden: int = 32,
        rate: float = 0.1,
        shortest: float = 512.0,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {hidden}")
        if not rate > 0.0 or not shortest > 0.0:
            raise ValueError(f"rate and shortest must be positive, got {rate!r} and {shortest!r}")
        self.shortest = shortest
        self.rate = nn.Parameter(torch.tensor(rate))
        self.multiplier = nn.Parameter(torch.tensor(1.0))
        """Of `shortest`."""
        self.mlp = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, heads))

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        position = token_positions(query.shape[2], key.shape[2], context, x.device).to(self.rate.dtype)
        longest = torch.maximum(position, (self.multiplier * self.shortest).abs())
        share = self._psi(distances(query, key).clamp(min=0)) / (self._psi(longest) + SMALL)[..., None]
        bias = self.mlp(share[..., None]).movedim(-1, -3)
        dropout = self.active_dropout(context)
        return causal_softmax_attention(query, key, value, context, dropout=dropout, bias=bias)

    def _psi(self, x: Tensor) -> Tensor:
        return torch.log1p((self.rate * x).abs())

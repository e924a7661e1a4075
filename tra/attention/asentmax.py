"""ASEntmax: 1.5-entmax whose scale grows with the number of keys (Vasylenko et al. 2025, arXiv 2506.16640)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.base import Attention, Context, distances
from tra.attention.dense import dense_mix, dense_scores
from tra.attention.entmax import dense_entmax
from tra.attention.nape import Positions, half_slopes, scale_last_heads
from tra.attention.positions import log_positions


class AdaptiveScaleEntmaxAttention(Attention):
    """1.5-entmax attention: keys whose scores are low beside those of other keys get a weight of exactly 0.

    Scores of the heads without positions are multiplied by 1 + b log(n + 1)^c, with n the number of keys, and
    b = softplus(w_b . x + v_b) and c = 2 tanh(w_c . x + v_c) read at the query. Takes the arguments of
    :class:`~tra.attention.base.Attention`, and:

    Args:
        positions: "nape" or "none".
    """

    slopes: Tensor

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, positions: Positions = "nape", **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        slopes = half_slopes(heads, positions)
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)
        self.factor = nn.Linear(width, slopes.count(0.0))
        self.exponent = nn.Linear(width, slopes.count(0.0))

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        query = scale_last_heads(query, self.length_scale(x, log_positions(query, key, context)))
        scores = dense_scores(query, key, context) - self.slopes[:, None, None] * distances(query, key)
        return dense_mix(dense_entmax(scores, context.visible(query, key)), value, self.active_dropout(context))

    def length_scale(self, x: Tensor, log_position: Tensor) -> Tensor:
        """``[B, heads without positions, L]``: what the scores of a query are multiplied by."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        factor, exponent = (projection(x).to(dtype).transpose(1, 2) for projection in (self.factor, self.exponent))
        return 1.0 + F.softplus(factor) * log_position ** (2.0 * exponent.tanh())

"""ALiBi: attention with linear biases (Press et al. 2022, arXiv 2108.12409) on PyTorch's SDPA."""

import math
from typing import Any

import torch
from torch import Tensor

from tra.attention import flex
from tra.attention.base import Attention, Context, causal_softmax_attention


class LinearBiasAttention(Attention):
    """Softmax attention whose scores fall linearly with distance, at a fixed slope for each head."""

    uses_sdpa = True
    slopes: Tensor

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, **shared: Any) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.register_buffer("slopes", torch.tensor(self.head_slopes(heads)), persistent=False)

    @staticmethod
    def head_slopes(heads: int) -> list[float]:
        """A geometric series from 2^(-8/heads) down to 2^-8; for other than powers of two, the authors' interpolation:
        the series of the next lower power, then every other slope of the next higher one."""
        lower = 2 ** math.floor(math.log2(heads))
        slopes = [2.0 ** (-8.0 * (head + 1) / lower) for head in range(lower)]
        return slopes + [2.0 ** (-4.0 * (2 * head + 1) / lower) for head in range(heads - lower)]

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        bias, dropout = linear_bias(self.slopes), self.active_dropout(context)
        return causal_softmax_attention(query, key, value, context, dropout=dropout, bias=bias)


def linear_bias(slopes: Tensor) -> flex.Bias:
    """Every step of distance costs a head its slope ``[Hq]``."""
    return lambda b, h, q, k: -slopes[h] * (q - k)

"""KERPLE with its logarithmic kernel (Chi et al. 2022, arXiv 2205.09921) on PyTorch's SDPA."""

from typing import Any

import torch
from torch import Tensor, nn

from tra.attention.base import Attention, Context, causal_softmax_attention

LEAST = 0.01
"""Both parameters of a head are held above this, as in the authors' code."""


class KernelBiasAttention(Attention):
    """Softmax attention whose scores lose r1 log(1 + r2 distance), with r1 and r2 learned for each head."""

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, **shared: Any) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.slope = nn.Parameter(nn.init.uniform_(torch.empty(heads), 0.0, 2.0))
        self.rate = nn.Parameter(nn.init.uniform_(torch.empty(heads)))

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        slope, rate = _held(self.slope), _held(self.rate)

        def bias(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return -slope[h] * torch.log1p(rate[h] * (q - k).clamp(min=0))

        return causal_softmax_attention(query, key, value, context, dropout=self.active_dropout(context), bias=bias)


def _held(x: Tensor) -> Tensor:
    """No less than `LEAST`. The gradient passes all the same, so that one that is held can leave again."""
    return x + (x.clamp(min=LEAST) - x).detach()

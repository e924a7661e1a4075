"""T5's relative position bias (Raffel et al. 2020, arXiv 1910.10683) on PyTorch's SDPA.

Each layer learns its own bias, and scores keep their scale of 1 / sqrt(D), as for every mechanism here.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tra.attention.base import Attention, Context, causal_softmax_attention


class BucketBiasAttention(Attention):
    """Softmax attention with a learned bias for each head and bucket of distances.

    Takes the arguments of :class:`~tra.attention.base.Attention`, and:

    Args:
        buckets: half of them hold one distance each, the others grow logarithmically.
        max_distance: from here on all distances share the last bucket.
    """

    uses_sdpa = True

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if buckets < 2 or max_distance <= buckets // 2:
            raise ValueError(f"max_distance must exceed half of the buckets ({buckets}), got {max_distance}")
        self.buckets, self.max_distance = buckets, max_distance
        self.bias = nn.Embedding(buckets, heads)
        nn.init.normal_(self.bias.weight, std=width**-0.5)

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        table, buckets, max_distance = self.bias.weight, self.buckets, self.max_distance

        def bias(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return table[bucket_of((q - k).clamp(min=0), buckets, max_distance), h]

        return causal_softmax_attention(query, key, value, context, dropout=self.active_dropout(context), bias=bias)


def bucket_of(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance back from the query."""
    exact = buckets // 2
    growth = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

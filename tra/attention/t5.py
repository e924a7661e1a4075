"""T5's relative position bias (Raffel et al. 2020, arXiv 1910.10683) on PyTorch's SDPA.

Each layer learns its own bias, and scores keep their scale of 1 / sqrt(D), as for every mechanism here.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tra.attention import flex
from tra.attention.base import Attention, Context, causal_softmax_attention, distances


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
        dropout = self.active_dropout(context)
        if flex.suits(query, context, dropout):
            # The bucket of every distance that there is: less work than finding it for every pair.
            bucket = bucket_of(torch.arange(key.shape[2], device=key.device), self.buckets, self.max_distance)
            by_distance = self.bias(bucket)
            return flex.biased_attention(
                query, key, value, context, lambda b, h, q, k: by_distance[(q - k).clamp(min=0), h]
            )
        bucket = bucket_of(distances(query, key).clamp(min=0), self.buckets, self.max_distance)
        bias = self.bias(bucket).permute(2, 0, 1)
        return causal_softmax_attention(query, key, value, context, dropout=dropout, bias=bias[None])


def bucket_of(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance back from the query."""
    exact = buckets // 2
    growth = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

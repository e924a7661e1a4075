"""For rules that no library computes: scores, softmax and mixing with the whole matrix of weights in memory."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention.context import Context


def dense_scores(query: Tensor, key: Tensor, context: Context) -> Tensor:
    """Scaled products ``[B, Hq, Lq, Lk]``, in at least float32."""
    context.note(query, key, 1 / math.sqrt(query.shape[3]))
    return full_product(query, _shared_by_groups(key, query.shape[1]).mT) / math.sqrt(query.shape[3])


def full_product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product in at least float32, whatever autocast says."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    with torch.autocast(left.device.type, enabled=False):
        return left.to(dtype) @ right.to(dtype)


def dense_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Weights over the visible keys; exactly 0 elsewhere and where a query sees no key."""
    weights = logits.masked_fill(~visible, torch.finfo(logits.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~visible, 0.0)


def dense_mix(weights: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Weighted sums of the values ``[B, Hq, Lq, Dv]``, in their dtype."""
    weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
    return weights.to(value.dtype) @ _shared_by_groups(value, weights.shape[1])


def sum_from_right(x: Tensor) -> Tensor:
    """Sums over each entry of the last dimension and those after it."""
    return x.flip(-1).cumsum(dim=-1).flip(-1)


def _shared_by_groups(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)

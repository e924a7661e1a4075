"""Where a token stands among those that it may see."""

import torch
from torch import Tensor

from tra.attention.context import Context


def token_positions(query: Tensor, key: Tensor, context: Context) -> Tensor:
    """``[B or 1, Lq]``, from 0: how many tokens of the same document, padding not counted, come before each new one.

    ``query`` holds the new tokens and ``key`` all of them.
    """
    first, keys = key.shape[2] - query.shape[2], key.shape[2]
    if context.segment_ids is not None:
        return (context.visible(query, key)[:, 0].sum(dim=-1) - 1).clamp(min=0)
    if context.key_mask is not None:
        return (context.key_mask.cumsum(dim=-1)[:, first:] - 1).clamp(min=0)
    return torch.arange(first, keys, device=query.device)[None]


def log_positions(query: Tensor, key: Tensor, context: Context) -> Tensor:
    """``[B or 1, 1, Lq]``, in at least float32: the logarithm of the position counted from 2, which is never 0."""
    position = token_positions(query, key, context)[:, None]
    return torch.log(position.to(torch.promote_types(query.dtype, torch.float32)) + 2.0)

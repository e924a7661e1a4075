"""Positions of tokens, counted among the tokens that they can see."""

import torch
from torch import Tensor

from tra.attention.context import Context
from tra.ops.visibility import visible_keys


def token_positions(new: int, tokens: int, context: Context, device: torch.device) -> Tensor:
    """``[B or 1, new]``, from 0: how many tokens of the same document, padding not counted, come before each of the new
    ones, which are the last of all tokens."""
    if context.segment_ids is not None:
        seen = visible_keys(new, tokens, context.key_mask, context.segment_ids, device)
        return (seen[:, 0].sum(dim=-1) - 1).clamp(min=0)
    if context.key_mask is not None:
        return (context.key_mask.cumsum(dim=-1)[:, tokens - new :] - 1).clamp(min=0)
    return torch.arange(tokens - new, tokens, device=device)[None]


def log_positions(query: Tensor, key: Tensor, context: Context) -> Tensor:
    """``[B or 1, 1, Lq]``, in at least float32: the logarithm of the position counted from 2, which is never 0."""
    position = token_positions(query.shape[2], key.shape[2], context, query.device)[:, None]
    return torch.log(position.to(torch.promote_types(query.dtype, torch.float32)) + 2.0)

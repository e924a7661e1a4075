"""How many kept keys a row reads before the rest is certified not to matter: the early stop as an equation.

An implementation that stops does so here, and one that visits every key answers as if it did where that shows: what
lies beyond a row's reach can neither spoil it nor break the caller's `score_bound`. docs/kernel.md has the proof.
"""

import math

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.visibility import query_positions

SLACK = 1.001
"""Computed scores and norms may pass their exact bounds by rounding."""


def row_reach(inputs: Inputs, options: Options) -> Tensor:
    """Return [B, Hq, Lq] in double precision: the count of kept keys at which each row is done, infinite for never."""
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    gate = inputs.log_gate.to(dtype).double()
    return (row_decay(inputs, options) / -gate).ceil().where(gate < 0.0, math.inf)


def row_decay(inputs: Inputs, options: Options) -> Tensor:
    """Return how far each row must decay before it is done, in double precision: [B, Hq, Lq], or one number for all."""
    query, key = inputs.query, inputs.key
    dtype = torch.promote_types(query.dtype, torch.float32)
    tolerance = options.tolerance * (1.0 - options.dropout)
    scale = torch.tensor(options.scale, dtype=dtype).item()

    def number(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=query.device)

    if tolerance == 0.0:
        return number(math.inf)
    if inputs.row_bound is not None:
        bound = inputs.row_bound.double() * SLACK
        bound = bound.where(bound.isfinite(), math.inf)
    elif options.score_bound is not None:
        bound = number(options.score_bound * SLACK)
    else:
        readable = key.isfinite().all(-1)
        if inputs.key_mask is not None:
            readable = readable & inputs.key_mask[:, None]
        key_norm = (
            torch.linalg.vector_norm(key, dim=-1, dtype=torch.float64)
            .to(dtype)
            .double()
            .where(readable, 0.0)
            .cummax(-1)
            .values
        )
        position = query_positions(query.shape[2], key.shape[2], inputs.key_lengths, key.device).clamp(min=0)
        key_norm = key_norm.gather(2, position[:, None].expand(*key.shape[:2], -1))
        key_norm = key_norm.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        size = scale * torch.linalg.vector_norm(query, dim=-1, dtype=torch.float64) * SLACK
        # A key's norm may overflow, but a query of zeros scores 0 with every key.
        bound = (size * key_norm).where(size > 0.0, 0.0)
    spread = (bound - torch.maximum(-bound, row_threshold(inputs, options, dtype).double())).clamp(min=0.0)
    odds = spread + math.log(2.0 / tolerance)
    return torch.logaddexp(odds, torch.zeros_like(odds)) * (1.0 + 1e-9)


def row_threshold(inputs: Inputs, options: Options, dtype: torch.dtype) -> Tensor:
    """The threshold of each row, [B, Hq, Lq], or one number for all."""
    if inputs.row_threshold is not None:
        return inputs.row_threshold.to(dtype)
    return torch.full((), options.threshold, dtype=dtype, device=inputs.query.device)


def largest_score(inputs: Inputs, options: Options) -> Tensor | None:
    """What the scores of a row's kept keys may be by the caller's word, with room for rounding queries and keys:
    [B, Hq, Lq], or one number for all; None without that word."""
    slack = SLACK * (1.0 + torch.finfo(inputs.query.dtype).eps)
    if inputs.row_bound is not None:
        bound = inputs.row_bound.double() * slack
        return bound.where(bound.isfinite(), math.inf)
    return None if options.score_bound is None else torch.tensor(options.score_bound * slack, dtype=torch.float64)

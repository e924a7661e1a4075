"""PaTH: positions by accumulated Householder-like transformations (Yang et al. 2025, arXiv 2505.16381).

The dense form: all products of transformations are had from one triangular system of equations (the UT transform), as
in flash-linear-attention's naive form. The authors' fast algorithm works block by block.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.base import Attention, Context, distances
from tra.attention.dense import dense_mix, dense_softmax, full_product

TAPS = 3
"""Tokens that the convolution of directions sees."""


class PathAttention(Attention):
    """Softmax attention in which every token between a key and the query transforms the key: s = q . P k / sqrt(d).

    P is the product of I - b w w^T over the tokens after the key up to the query, the nearest to the query first. Each
    token has a direction w of length 1, made from x by two linear maps, a convolution over three tokens and silu, and a
    b = 2 sigmoid(u . x + v). Key and value heads have their own. Takes the arguments of
    :class:`~tra.attention.base.Attention`, and:

    Args:
        rank: width between the two linear maps.
    """

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, *, rank: int = 32, **shared: Any) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        self.direction = nn.Sequential(
            nn.Linear(width, rank, bias=False), nn.Linear(rank, self.kv_heads * self.head_width, bias=False)
        )
        self.taps = nn.Parameter(torch.empty(TAPS, self.kv_heads, 1, self.head_width))
        """The convolution: what each channel takes of its token, of the one before and of the one before that."""
        nn.init.uniform_(self.taps, -(TAPS**-0.5), TAPS**-0.5)
        self.strength = nn.Linear(width, self.kv_heads)

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        raw = self.direction(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        strength = 2.0 * self.strength(x).sigmoid().transpose(1, 2)
        key, value, raw, strength = context.remember(key, value, raw, strength)
        if context.key_mask is not None:  # padding transforms nothing
            strength = strength.masked_fill(~context.key_mask[:, None], 0.0)
        context.note(query, key, 1 / math.sqrt(self.head_width))  # scores before anything is transformed
        scores = transformed_scores(query, key, self.directions(raw, context), strength)
        weights = dense_softmax(scores, context.visible(query, key))
        return dense_mix(weights, value, self.active_dropout(context))

    def directions(self, raw: Tensor, context: Context) -> Tensor:
        """``[B, kv_heads, L, D]`` of length 1, in at least float32. No token sees padding or another document."""
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        length, segments = raw.shape[2], context.segment_ids
        if context.key_mask is not None:
            raw = raw.masked_fill(~context.key_mask[:, None, :, None], 0.0)
        mixed = raw * self.taps[0]
        for back in range(1, TAPS):
            earlier = F.pad(raw, (0, 0, back, 0))[:, :, :length]
            if segments is not None:
                other = segments != F.pad(segments, (back, 0))[:, :length]
                earlier = earlier.masked_fill(other[:, None, :, None], 0.0)
            mixed = mixed + earlier * self.taps[back]
        return F.normalize(F.silu(mixed), dim=-1)


def transformed_scores(query: Tensor, key: Tensor, direction: Tensor, strength: Tensor) -> Tensor:
    """Scaled scores ``[B, Hq, Lq, Lk]`` of queries and keys, given ``[B, Hkv, Lk, D]`` directions and ``[B, Hkv, Lk]``
    strengths."""
    groups = query.shape[1] // key.shape[1]
    weighted = direction * strength[..., None]
    key, direction, weighted = (x.repeat_interleave(groups, dim=1) for x in (key, direction, weighted))
    from_token_on = distances(query, key) >= 0
    nearer = distances(key, key) > 0
    # With w and b in rows, P = I - W^T (I + lower(b W W^T))^-1 (b W), where a row is a token between key and query.
    overlap = full_product(weighted, direction.mT).masked_fill(~nearer, 0.0)
    seen = full_product(query, direction.mT).masked_fill(~from_token_on, 0.0)
    solved = torch.linalg.solve_triangular(overlap, seen, upper=False, left=False, unitriangular=True)
    taken = full_product(solved, full_product(weighted, key.mT).masked_fill(~nearer, 0.0))
    return (full_product(query, key.mT) - taken) / math.sqrt(query.shape[3])

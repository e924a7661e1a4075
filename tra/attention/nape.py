"""NAPE: no positions in half of the heads, ALiBi in the others (Vasylenko et al. 2025, arXiv 2506.16640)."""

from typing import Literal, get_args

import torch
from torch import Tensor

from tra.attention.alibi import LinearBiasAttention
from tra.lookup import lookup

Positions = Literal["nape", "none"]


class HalfBiasAttention(LinearBiasAttention):
    """Softmax attention with ALiBi's bias in the first half of the heads (slope 1 / h in head h), none in the others.

    Heads are counted from 1. A single head has no positions.
    """

    @staticmethod
    def head_slopes(heads: int) -> list[float]:
        return half_slopes(heads)


def half_slopes(heads: int, positions: Positions = "nape") -> list[float]:
    """The slope of each head; those with positions come first. Without positions all are 0."""
    lookup(dict.fromkeys(get_args(Positions)), positions, "positions")
    biased = heads // 2 if positions == "nape" else 0
    return [1.0 / head for head in range(1, biased + 1)] + [0.0] * (heads - biased)


def scale_last_heads(query: Tensor, factor: Tensor) -> Tensor:
    """``[B, Hq, L, D]`` with the queries of the last heads multiplied by ``factor [B or 1, heads, L]``."""
    heads = factor.shape[1]
    last = query[:, -heads:] * factor[..., None]
    return torch.cat([query[:, :-heads], last.to(query.dtype)], dim=1)

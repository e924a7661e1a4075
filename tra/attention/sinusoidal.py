"""Sinusoidal absolute positions (Vaswani et al. 2017, arXiv 1706.03762), added where queries and keys are made.

Adding them in every layer and to queries and keys only is position-infused attention (Press et al. 2020, arXiv
2012.15832): the stream stays free of positions, which suits the residual on the normalised stream.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tra.attention.base import Context
from tra.attention.nope import UnpositionedAttention
from tra.attention.positions import token_positions


class SinusoidalAttention(UnpositionedAttention):
    """Softmax attention whose queries and keys are made from the input plus sines and cosines of its position.

    A position counts the tokens of the same document that are not padding. Takes the arguments of
    :class:`~tra.attention.base.Attention`, and ``theta``, the base of the wavelengths.
    """

    takes_static_cache = False

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, theta: float = 10_000.0, **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if width % 2:
            raise ValueError(f"width must be even for sinusoidal positions, got {width}")
        if not 1.0 < theta < math.inf:
            raise ValueError(f"theta must be greater than 1, got {theta!r}")
        self.theta = theta

    def add_positions(self, x: Tensor, context: Context) -> Tensor:
        queries, width = x.shape[1:]
        assert isinstance(context.cached, int)
        keys = context.cached + queries
        if context.key_mask is None and context.segment_ids is None:
            return x + sinusoids(context.cached, keys, width, self.theta).to(x)
        return x + sinusoids(0, keys, width, self.theta).to(x)[token_positions(queries, keys, context, x.device)]


def sinusoids(start: int, stop: int, width: int, theta: float) -> Tensor:
    """``[stop - start, width]``: sine and cosine by turns, in float64 on the CPU as the angles of RoPE are."""
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angle = torch.arange(start, stop, dtype=torch.float64, device="cpu")[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)

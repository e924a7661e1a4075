"""RoPE: rotary position embedding (Su et al. 2021, arXiv 2104.09864) on PyTorch's SDPA."""

from typing import Any

import torch
from torch import Tensor

from tra.attention.base import Attention, Context, causal_softmax_attention


class RotaryAttention(Attention):
    """Softmax attention whose queries and keys are rotated by an angle that grows with their position.

    Takes the arguments of :class:`~tra.attention.base.Attention`, and ``theta``, the base of the wavelengths.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, theta: float = 500_000.0, **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if self.head_width % 2:
            raise ValueError(f"width // heads must be even for RoPE, got {self.head_width}")
        self.theta = theta

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        turn = rotation(context.cached, context.cached + x.shape[1], self.head_width, self.theta)
        query, key = rotate(query, *turn), rotate(key, *turn)
        key, value = context.remember(key, value)
        return causal_softmax_attention(query, key, value, context, dropout=self.active_dropout)


def rotation(start: int, stop: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[stop - start, width // 2]`` of the angle of each position and frequency.

    In float64 on the CPU: in float32 an angle at position 100,000 is off by more than 0.001, and some devices have
    no float64.
    """
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angle = torch.arange(start, stop, dtype=torch.float64, device="cpu")[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of ``[..., L, D]``, computing in at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = (y.to(dtype).to(x.device) for y in (cosine, sine))
    first, second = x.to(dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return rotated.to(x.dtype)

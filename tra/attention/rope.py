"""RoPE: rotary position embedding (Su et al. 2021, arXiv 2104.09864) on PyTorch's SDPA.

For sequences longer than in training, ``scaling`` slows the rotation down by a ``factor``:

- "linear": all pairs alike (Chen et al. 2023, arXiv 2306.15595).
- "ntk": by a greater theta, which slows the slowest pair by the factor and the fastest not at all (bloc97 2023).
- "yarn": only pairs that do not turn fully within the trained length, with slightly larger scores (Peng et al. 2023,
  arXiv 2309.00071).

"linear" and "yarn" are as in transformers. "ntk" is its "dynamic" (with its own factor 1) fixed at ``factor`` times the
trained length.
"""

import math
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from tra.attention.base import Attention, Context, causal_softmax_attention
from tra.lookup import lookup

Scaling = Literal["none", "linear", "ntk", "yarn"]
TURNS = (32, 1)
"""YaRN's beta_fast and beta_slow: pairs that turn more often within the trained length are left alone, and pairs that
turn less often are slowed down by the whole factor."""


class RotaryAttention(Attention):
    """Softmax attention whose queries and keys are rotated by an angle that grows with their position.

    Takes the arguments of :class:`~tra.attention.base.Attention`, and:

    Args:
        theta: the base of the wavelengths.
        scaling: how the rotation is slowed down for sequences longer than in training.
        factor: how many times longer they are.
        trained_length: tokens of the training sequences; "yarn" needs it.
    """

    uses_sdpa = True
    takes_static_cache = True
    rotary_parts: ClassVar[int] = 1
    """Number of parts of a head that are rotated separately."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        theta: float = 500_000.0,
        scaling: Scaling = "none",
        factor: float = 1.0,
        trained_length: int | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if self.head_width % (2 * self.rotary_parts):
            raise ValueError(
                f"width // heads must be a multiple of {2 * self.rotary_parts} for RoPE, got {self.head_width}"
            )
        part = self.head_width // self.rotary_parts
        if not 1.0 < theta < math.inf:
            raise ValueError(f"theta must be greater than 1, got {theta!r}")
        lookup(dict.fromkeys(get_args(Scaling)), scaling, "scaling")
        if scaling == "none" and factor != 1.0:
            raise ValueError(f"factor must be 1 without scaling, got {factor!r}")
        if scaling != "none" and not 1.0 < factor < math.inf:
            raise ValueError(f"factor must be greater than 1 for scaling {scaling!r}, got {factor!r}")
        if scaling == "yarn" and (trained_length is None or trained_length < 1):
            raise ValueError(f"trained_length must be at least 1 for scaling 'yarn', got {trained_length}")
        if scaling != "yarn" and trained_length is not None:
            raise ValueError(f"trained_length must be None for scaling {scaling!r}, got {trained_length}")
        if scaling == "ntk" and part == 2:
            raise ValueError("width // heads must be more than one pair for scaling 'ntk', which slows the others down")
        self.frequency = frequencies(part, theta, scaling, factor, trained_length)
        # YaRN makes queries and keys larger: distant scores would else be too even.
        self.rotation_size = 0.1 * math.log(factor) + 1.0 if scaling == "yarn" else 1.0

    def turn(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Cosine and sine that rotate the new tokens. Call it before they enter the cache."""
        first = context.cached
        if isinstance(first, Tensor):  # which stays on its device
            exact = torch.float32 if first.device.type == "mps" else torch.float64
            position = first + torch.arange(x.shape[1], device=first.device)
            angle = position[:, None] * self.frequency.to(first.device, exact)
            return angle.cos() * self.rotation_size, angle.sin() * self.rotation_size
        return rotation(first, first + x.shape[1], self.frequency, self.rotation_size)

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        turn = self.turn(x, context)
        query, key = rotate(query, *turn), rotate(key, *turn)
        key, value = context.remember(key, value)
        return causal_softmax_attention(query, key, value, context, dropout=self.active_dropout(context))


def frequencies(
    width: int, theta: float, scaling: Scaling = "none", factor: float = 1.0, trained_length: int | None = None
) -> Tensor:
    """``[width // 2]``: the angle by which each pair turns from one position to the next.

    In float64 on the CPU, as the angles are.
    """
    if scaling == "ntk":
        theta *= factor ** (width / (width - 2))
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    if scaling == "linear":
        return frequency / factor
    if scaling == "yarn":
        assert trained_length is not None
        fast, slow = (width * math.log(trained_length / (turns * math.tau)) / (2 * math.log(theta)) for turns in TURNS)
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), width - 1)
        ramp = (torch.arange(width // 2, dtype=torch.float64, device="cpu") - first) / max(last - first, 0.001)
        slowed = ramp.clamp(0.0, 1.0)
        return frequency * (1.0 - slowed) + frequency / factor * slowed
    return frequency


def rotation(start: int, stop: int, frequency: Tensor, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[stop - start, width // 2]`` of the angle of each position and frequency, times a size.

    In float64 on the CPU: in float32 an angle at position 100,000 is off by more than 0.001, and some devices have
    no float64.
    """
    angle = torch.arange(start, stop, dtype=torch.float64, device="cpu")[:, None] * frequency
    return angle.cos() * size, angle.sin() * size


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of ``[..., L, D]``, computing in at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = (y.to(dtype).to(x.device) for y in (cosine, sine))
    first, second = x.to(dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return rotated.to(x.dtype)

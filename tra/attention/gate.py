"""The learned gate of mechanisms that decay: one number per head, read from each token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.base import Attention


class GatedAttention(Attention):
    """Attention with a gate, sigmoid(w . x + b), for each head; a subclass uses it.

    Takes the arguments of :class:`~tra.attention.base.Attention`, and:

    Args:
        gate_bias: b at the start, by default PyTorch's random value; 5 is nearly no decay.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, gate_bias: float | None = None, **shared: Any
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.gate = linear_gate(width, heads, gate_bias)

    def gates(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)).transpose(1, 2)

    def log_gate(self, x: Tensor) -> Tensor:
        """``[B, heads, L]``, never positive: the logarithm of `gates`, taken before they are rounded."""
        return F.logsigmoid(self.gate(x)).transpose(1, 2)


def linear_gate(width: int, heads: int, bias: float | None) -> nn.Linear:
    """The linear map before the sigmoid. A given bias overwrites the random one, so later random numbers do not depend
    on it."""
    gate = nn.Linear(width, heads)
    if bias is not None:
        nn.init.constant_(gate.bias, bias)
    return gate

"""The learned gate of mechanisms that decay: one number per head, read from each token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.alibi import head_slopes
from tra.attention.base import Attention


class GatedAttention(Attention):
    """Attention with a gate, sigmoid(w . x + b), for each head; what it does there is a subclass.

    Takes the arguments of :class:`~tra.attention.base.Attention`, and:

    Args:
        gate_bias: b at the start, by default as PyTorch chooses it at random; 5 is nearly no decay.
        gate_spread: start b at a different value in each head, so that heads decay as fast as those of ALiBi do.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        gate_bias: float | None = None,
        gate_spread: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if gate_spread and gate_bias is not None:
            raise ValueError(f"gate_bias must be None with gate_spread, which sets it for each head, got {gate_bias!r}")
        self.gate = linear_gate(width, heads, gate_bias)
        if gate_spread:
            with torch.no_grad():  # log sigmoid(b) = -slope
                self.gate.bias.copy_(-torch.tensor(head_slopes(heads)).expm1().log())

    def gates(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)).transpose(1, 2)

    def log_gate(self, x: Tensor) -> Tensor:
        """``[B, heads, L]``, never positive: the logarithm of `gates`, taken before they are rounded."""
        return F.logsigmoid(self.gate(x)).transpose(1, 2)


def linear_gate(width: int, heads: int, bias: float | None) -> nn.Linear:
    """What is read before the sigmoid. A given bias replaces the random one, so that whatever is random later is not
    moved by it."""
    gate = nn.Linear(width, heads)
    if bias is not None:
        nn.init.constant_(gate.bias, bias)
    return gate

"""The learned gate of mechanisms that decay: one number per head, read from each token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear_gate(width: int, heads: int, bias: float | None) -> nn.Linear:
    """What is read before the sigmoid. A given bias replaces the drawn one, so that whatever is drawn later is not
    moved by it."""
    gate = nn.Linear(width, heads)
    if bias is not None:
        nn.init.constant_(gate.bias, bias)
    return gate


def opened(gate: nn.Module, x: Tensor) -> Tensor:
    """``[B, heads, L]`` in (0, 1): the gate of each head at each token of ``x [B, L, width]``."""
    return torch.sigmoid(gate(x)).transpose(1, 2)


def log_opened(gate: nn.Module, x: Tensor) -> Tensor:
    """The logarithm of that, without rounding a gate near 0 or 1 first."""
    return F.logsigmoid(gate(x)).transpose(1, 2)

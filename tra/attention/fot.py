"""FoT: the forgetting transformer (Lin et al. 2025, arXiv 2503.02130) on PyTorch's SDPA."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention.base import Context, causal_softmax_attention
from tra.attention.gate import GatedAttention


class ForgettingAttention(GatedAttention):
    """Softmax attention in which the gate of each token makes each head forget a share of all earlier tokens.

    The score of query i and key j gains the sum of log f_l over the tokens l after j up to i, where f is the gate.
    """

    uses_sdpa = True

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        gate = self.gate(x)
        log_forget = F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32))).transpose(1, 2)
        key, value, log_forget = context.remember(key, value, log_forget)
        if context.key_mask is not None:
            log_forget = log_forget.masked_fill(~context.key_mask[:, None], 0.0)
        high, low = running_sum(log_forget)

        def bias(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (high[b, h, q] - high[b, h, k]) + (low[b, h, q] - low[b, h, k])

        return causal_softmax_attention(query, key, value, context, dropout=self.active_dropout(context), bias=bias)


def running_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Running sums over the last dimension as two numbers, the rounded sum and what rounding left.

    Differences of such sums are wanted, of which one float32 over 100,000 tokens would leave three digits.
    """
    if x.device.type == "mps":  # has no float64
        total = x.cumsum(dim=-1)
        return total, torch.zeros_like(total)
    exact = x.double().cumsum(dim=-1)
    high = exact.to(x.dtype)
    return high, (exact - high).to(x.dtype)

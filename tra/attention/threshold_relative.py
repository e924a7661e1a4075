"""TRA: threshold relative attention (Opper et al., TMLR 2025, arXiv 2503.23174)."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.base import Attention, Context
from tra.ops import threshold_relative_attention


class ThresholdRelativeAttention(Attention):
    """Attention over the keys that pass a threshold, with distance counted among those keys.

    Takes the arguments of :class:`~tra.attention.base.Attention`, and:

    Args:
        threshold: a key is kept when its score is greater.
        tolerance: certified error allowed for stopping early; None means float32 rounding.
        impl: which implementation of the operator to use.

    Example:
        >>> attention = ThresholdRelativeAttention(width=64, heads=4)
        >>> attention(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        threshold: float = 0.0,
        tolerance: float | None = None,
        impl: str = "auto",
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        self.threshold, self.tolerance, self.impl = threshold, tolerance, impl
        self.gate = nn.Linear(width, heads)

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        return threshold_relative_attention(
            query,
            key,
            value,
            self.log_gate(x),
            key_mask=context.key_mask,
            segment_ids=context.segment_ids,
            threshold=self.threshold,
            dropout=self.active_dropout,
            tolerance=self.tolerance,
            # Vectors of root mean square 1 have norm sqrt(D), so no score exceeds sqrt(D).
            score_bound=math.sqrt(self.head_width) if self.qk_norm else None,
            impl=self.impl,
        )

    def log_gate(self, x: Tensor) -> Tensor:
        """``[B, Hq, L]``, never positive: what a step of distance costs each query."""
        return F.logsigmoid(self.gate(x)).transpose(1, 2)

    def weights(self, x: Tensor, *, key_mask: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """As for every mechanism; no key is left out for stopping early, so 0 means not kept."""
        usual = self.tolerance, self.impl
        self.tolerance, self.impl = 0.0, "reference"
        try:
            return super().weights(x, key_mask=key_mask, segment_ids=segment_ids)
        finally:
            self.tolerance, self.impl = usual

"""TRA: threshold relative attention (Opper et al., TMLR 2025, arXiv 2503.23174)."""

import math
from abc import abstractmethod
from typing import Any

from torch import Tensor

from tra.attention.base import Attention, Context
from tra.attention.gate import GatedAttention
from tra.lookup import lookup
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative.op import IMPLEMENTATIONS

KEEPS_ALL = -1e30
"""A threshold below every score, and finite as the operator wants it."""


class OperatorAttention(Attention):
    """Attention through the operator of this package, whose threshold and gate a subclass decides.

    Takes the arguments of :class:`~tra.attention.base.Attention`, and:

    Args:
        tolerance: certified error allowed for stopping early; None means float32 rounding.
        impl: which implementation of the operator to use.
    """

    threshold: float

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        tolerance: float | None = None,
        impl: str = "auto",
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if tolerance is not None and not 0.0 <= tolerance < math.inf:
            raise ValueError(f"tolerance must be None or a number of at least 0, got {tolerance!r}")
        lookup({"auto": None, **IMPLEMENTATIONS}, impl, "impl")
        self.tolerance, self.impl = tolerance, impl

    @abstractmethod
    def log_gate(self, x: Tensor) -> Tensor:
        """``[B, Hq, L]``, never positive: what a step of distance costs each query."""

    def current_threshold(self) -> float:
        """What a score must exceed in this call: the threshold itself, but for an aid to training."""
        return self.threshold

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        log_gate = self.log_gate(x)
        context.note(query, key, 1 / math.sqrt(self.head_width), None, self.threshold, log_gate)
        return threshold_relative_attention(
            query,
            key,
            value,
            log_gate,
            key_mask=context.key_mask,
            segment_ids=context.segment_ids,
            threshold=self.threshold if context.exact else self.current_threshold(),
            dropout=self.active_dropout(context),
            # A key that an early stop leaves out would look as if it had not passed the threshold.
            tolerance=0.0 if context.exact else self.tolerance,
            # Vectors of root mean square 1 have norm sqrt(D), so no score exceeds sqrt(D).
            score_bound=math.sqrt(self.head_width) if self.qk_norm else None,
            impl="reference" if context.exact else self.impl,
        )


class ThresholdRelativeAttention(GatedAttention, OperatorAttention):
    """Attention over the keys that pass a threshold, with distance counted among those keys.

    Takes the arguments of :class:`~tra.attention.gate.GatedAttention` and :class:`OperatorAttention`, and:

    Args:
        threshold: a key is kept when its score is greater.
        threshold_rise: an aid to training, ours: the share of the steps over which the threshold rises to that from
            -sqrt(D), which keeps nearly all keys. In evaluation mode it is the threshold always.
        leak: an aid to training, ours: how much of the gradient of the same attention without a threshold is added, so
            that keys that are left out learn too. What is computed stays the same.

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
        threshold_rise: float = 0.0,
        leak: float = 0.0,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if not 0.0 <= threshold_rise <= 1.0:
            raise ValueError(f"threshold_rise must be a share of the steps in [0, 1], got {threshold_rise!r}")
        if not leak >= 0.0:
            raise ValueError(f"leak must be at least 0, got {leak!r}")
        self.threshold, self.threshold_rise, self.leak = threshold, threshold_rise, leak
        self.risen = 1.0
        """How much of the rise is done."""

    def train_from(self, share: float) -> None:
        self.risen = min(1.0, share / self.threshold_rise) if self.threshold_rise > 0.0 else 1.0

    def current_threshold(self) -> float:
        if not self.training or self.risen == 1.0:
            return self.threshold
        lowest = min(self.threshold, -math.sqrt(self.head_width))
        return lowest + self.risen * (self.threshold - lowest)

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        out = super().attend(x, query, key, value, context)
        if self.leak == 0.0 or not self.training or context.exact:
            return out
        whole = threshold_relative_attention(
            query,
            key,
            value,
            self.log_gate(x),
            key_mask=context.key_mask,
            segment_ids=context.segment_ids,
            threshold=KEEPS_ALL,
        )
        return out + self.leak * (whole - whole.detach())

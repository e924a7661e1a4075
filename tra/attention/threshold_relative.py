"""TRA: threshold relative attention (Opper et al., TMLR 2025, arXiv 2503.23174)."""

import math
from abc import abstractmethod
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.base import Attention, Context
from tra.attention.far_cache import FarCache, far_attention
from tra.attention.gate import GatedAttention
from tra.distributed.attention import gather_keys, sharded_attention
from tra.lookup import lookup
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative.op import IMPLEMENTATIONS

KEEPS_ALL = -1e30
"""A threshold below every score, and finite as the operator wants it."""
LearnedThreshold = Literal["head", "query"]
THRESHOLD_RATE = 10.0
"""Factor from the stored parameter to the learned threshold. The steps of AdamW do not depend on the size of
gradients, so the threshold moves ten times faster than other parameters."""


class OperatorAttention(Attention):
    """Attention through the operator of this package; a subclass defines threshold and gate.

    Takes the arguments of :class:`~tra.attention.base.Attention`, and:

    Args:
        tolerance: certified error allowed for stopping early; None means float32 rounding.
        impl: which implementation of the operator to use.
    """

    takes_shards = True
    takes_static_cache = True
    threshold: float | str
    straight_through: float = 0.0

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

    def thresholds(self, x: Tensor) -> float | Tensor:
        """What a score must exceed for its key to be kept: a number, or a tensor that broadcasts to ``[B, Hq, L]``."""
        assert not isinstance(self.threshold, str)
        return self.threshold

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        rule, threshold, log_gate = self.rule(context), self.thresholds(x), self.log_gate(x)
        if context.shards is not None:
            del rule["key_mask"], rule["segment_ids"]  # which the layout holds, of all shards
            if context.cache is not None:
                shards, layout = context.shards
                self.remembered(*gather_keys(shards, layout, key, value), context)
            return sharded_attention(*context.shards, query, key, value, log_gate, threshold=threshold, **rule)
        if isinstance(context.cache, FarCache) and self.qk_norm:
            if context.terms is not None:
                raise ValueError("cache must not be a FarCache for a look into the rule")
            return far_attention(context.cache, query, key, value, log_gate, threshold=threshold, **rule)
        key, value, norm = self.remembered(key, value, context)
        context.note(query, key, 1 / math.sqrt(self.head_width), None, threshold, log_gate)
        if norm is not None and query.shape[2] == 1 and not context.exact:
            rule["score_bound"] = score_bounds(query, norm, context.key_mask)
        lengths = context.key_lengths(x.shape[0])  # len() would fix the batch of an exported graph
        return threshold_relative_attention(
            query, key, value, log_gate, key_lengths=lengths, threshold=threshold, **rule
        )

    def remembered(self, key: Tensor, value: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of all tokens, and the norms of keys where they are kept to bound a new token's scores."""
        if self.qk_norm or context.cache is None:
            key, value = context.remember(key, value)
            return key, value, None
        key, value, norm = context.remember(key, value, key_norms(key))
        return key, value, norm

    def rule(self, context: Context) -> dict[str, Any]:
        """Arguments of the operator beside its tensors and the threshold."""
        return {
            "key_mask": context.key_mask,
            "segment_ids": context.segment_ids,
            "straight_through": self.straight_through,
            "dropout": self.active_dropout(context),
            # A key that an early stop leaves out would look as if it had not passed the threshold.
            "tolerance": 0.0 if context.exact else self.tolerance,
            # Vectors of root mean square 1 have norm sqrt(D), so no score exceeds sqrt(D).
            "score_bound": math.sqrt(self.head_width) if self.qk_norm else None,
            "impl": "reference" if context.exact else self.impl,
        }


def key_norms(key: Tensor) -> Tensor:
    """``[B, Hkv, L]``: norms as the operator computes them without a bound; 0 for keys that it treats as padding."""
    # In double precision, like the operator; on a GPU that would be a copy of all keys, and the bound has room.
    dtype = torch.float64 if key.device.type == "cpu" else torch.float32
    norm = torch.linalg.vector_norm(key, dim=-1, dtype=dtype).float()
    return norm.where(key.isfinite().all(-1), 0.0)


def score_bounds(query: Tensor, norm: Tensor, key_mask: Tensor | None) -> Tensor:
    """``[B, Hq, 1]``: the bound on a new token's scores that the operator would find by reading every key, computed
    from the norms of keys ``[B, Hkv, Lk]``."""
    if key_mask is not None:
        norm = norm.masked_fill(~key_mask[:, None], 0.0)
    scale = torch.tensor(1.0 / math.sqrt(query.shape[3]), dtype=torch.float32).item()  # as the kernel holds it
    size = scale * torch.linalg.vector_norm(query, dim=-1, dtype=torch.float64)
    return size * norm.amax(-1, keepdim=True).repeat_interleave(query.shape[1] // norm.shape[1], dim=1)


class ThresholdRelativeAttention(GatedAttention, OperatorAttention):
    """Attention over the keys that pass a threshold, with distance counted among those keys.

    Takes the arguments of :class:`~tra.attention.gate.GatedAttention` and :class:`OperatorAttention`, and:

    Args:
        threshold: a key is kept if its score is greater. A number, or learned (ours): "head" learns one number per
            head, "query" computes one per head and query by a learned projection.
        threshold_start: where a learned threshold starts. 0 is the published rule; a value below most scores, such as
            -2, keeps nearly all keys at first.
        straight_through: temperature of the straight-through gradient at the threshold (ours), from which dropped keys
            learn too; 0.5 does well. The output does not change. 0 stops that gradient, as published. A learned
            threshold needs a value greater than 0.

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
        threshold: float | LearnedThreshold = 0.0,
        threshold_start: float = 0.0,
        straight_through: float = 0.0,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if not 0.0 <= straight_through < math.inf:
            raise ValueError(f"straight_through must be a temperature of at least 0, got {straight_through!r}")
        if not -math.inf < threshold_start < math.inf:
            raise ValueError(f"threshold_start must be a finite number, got {threshold_start!r}")
        self.threshold, self.straight_through = threshold, straight_through
        if not isinstance(threshold, str):
            if threshold_start != 0.0:
                raise ValueError(f"threshold_start must be 0 for a threshold that is given, got {threshold_start!r}")
            return
        lookup(dict.fromkeys(get_args(LearnedThreshold)), threshold, "threshold")
        if straight_through == 0.0:
            raise ValueError(
                "straight_through must be greater than 0 for a learned threshold, whose gradient passes through it; "
                "0.5 does well"
            )
        # Nothing is drawn at random, so that everything else starts as it does beside a threshold that is given.
        self.threshold_bias = nn.Parameter(torch.full((heads,), threshold_start / THRESHOLD_RATE))
        if threshold == "query":
            self.threshold_weight = nn.Parameter(torch.zeros(heads, width))

    def thresholds(self, x: Tensor) -> float | Tensor:
        if not isinstance(self.threshold, str):
            return self.threshold
        bias = THRESHOLD_RATE * self.threshold_bias
        if self.threshold == "head":
            return bias[:, None]
        return F.linear(x, self.threshold_weight, bias).transpose(1, 2)


class LearnedThresholdAttention(ThresholdRelativeAttention):
    """TRA in the recommended form: each head learns its threshold, through straight-through gradients.

    The same arguments as :class:`ThresholdRelativeAttention` takes, with other defaults.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        threshold: LearnedThreshold = "head",
        straight_through: float = 0.5,
        **shared: Any,
    ) -> None:
        lookup(dict.fromkeys(get_args(LearnedThreshold)), threshold, "threshold")
        super().__init__(width, heads, kv_heads, threshold=threshold, straight_through=straight_through, **shared)

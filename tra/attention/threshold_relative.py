"""TRA: threshold relative attention (Opper et al., TMLR 2025, arXiv 2503.23174)."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tra.attention.base import Attention, Context
from tra.attention.dense import dense_mix, dense_scores
from tra.attention.gate import GatedAttention
from tra.attention.straight_through import straight_through_weights
from tra.lookup import lookup
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative.op import IMPLEMENTATIONS

KEEPS_ALL = -1e30
"""A threshold below every score, and finite as the operator wants it."""
LONG = 4096
"""Keys from which on it costs less to compute a new token's heads one by one than to find every key's norm again."""


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

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        rule, log_gate = self.rule(context), self.log_gate(x)
        key, value, norm = self.remembered(key, value, context)
        context.note(query, key, 1 / math.sqrt(self.head_width), None, self.threshold, log_gate)
        several = query.shape[2] > 1 or key.shape[2] < LONG
        if norm is None or several or context.exact or rule["dropout"] > 0.0 or is_compiling():
            return threshold_relative_attention(query, key, value, log_gate, **rule)
        return attend_one_by_one(query, key, value, log_gate, norm, rule)

    def remembered(self, key: Tensor, value: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of all tokens, and the norms of keys where they are kept to bound a new token's scores."""
        if self.qk_norm or context.cache is None or key.device.type != "cpu":
            key, value = context.remember(key, value)
            return key, value, None
        key, value, norm = context.remember(key, value, key_norms(key))
        return key, value, norm

    def rule(self, context: Context) -> dict[str, Any]:
        """What the operator is told beside its tensors."""
        return {
            "key_mask": context.key_mask,
            "segment_ids": context.segment_ids,
            "threshold": self.threshold,
            "dropout": self.active_dropout(context),
            # A key that an early stop leaves out would look as if it had not passed the threshold.
            "tolerance": 0.0 if context.exact else self.tolerance,
            # Vectors of root mean square 1 have norm sqrt(D), so no score exceeds sqrt(D).
            "score_bound": math.sqrt(self.head_width) if self.qk_norm else None,
            "impl": "reference" if context.exact else self.impl,
        }


def key_norms(key: Tensor) -> Tensor:
    """``[B, Hkv, L]``: what the operator finds itself where it is told no bound; 0 where it takes a key for padding."""
    norm = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float64).float()
    return norm.where(key.isfinite().all(-1), 0.0)


def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, norm: Tensor, rule: Mapping[str, Any]
) -> Tensor:
    """The operator for one new token, told the bound that it would find in all visible keys.

    One head of one sequence at a time, because each has a bound of its own. What is read of every key is its norm.
    """
    key_mask, segment_ids = rule["key_mask"], rule["segment_ids"]
    if key_mask is not None:
        norm = norm.masked_fill(~key_mask[:, None], 0.0)
    group = query.shape[1] // key.shape[1]
    scale = torch.tensor(1.0 / math.sqrt(query.shape[3]), dtype=torch.float32).item()  # as the kernel holds it
    size = scale * torch.linalg.vector_norm(query[:, :, 0], dim=-1, dtype=torch.float64)
    bounds = (size * norm.amax(-1).repeat_interleave(group, dim=1)).tolist()
    rows = []
    for b, of_heads in enumerate(bounds):
        sequence = slice(b, b + 1)
        own: dict[str, Any] = dict(rule)
        own["key_mask"] = None if key_mask is None else key_mask[sequence]
        own["segment_ids"] = None if segment_ids is None else segment_ids[sequence]
        for h, bound in enumerate(of_heads):
            head, key_head = slice(h, h + 1), slice(h // group, h // group + 1)
            # None for a query of zeros, or one that is not finite.
            own["score_bound"] = bound if 0.0 < bound < math.inf else None
            tensors = (
                query[sequence, head],
                key[sequence, key_head],
                value[sequence, key_head],
                log_gate[sequence, head],
            )
            rows.append(threshold_relative_attention(*tensors, **own))
    return torch.cat(rows).view(*query.shape[:3], value.shape[3])


class ThresholdRelativeAttention(GatedAttention, OperatorAttention):
    """Attention over the keys that pass a threshold, with distance counted among those keys.

    Takes the arguments of :class:`~tra.attention.gate.GatedAttention` and :class:`OperatorAttention`, and:

    Args:
        threshold: a key is kept when its score is greater.
        straight_through: an aid to training, ours: the temperature of the sigmoid through which the gradient passes the
            threshold, so that keys that are left out learn too; 0.5 does well. What is computed stays the same, and in
            training takes memory for the whole matrix of weights. 0 is the published rule, which stops that gradient.

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
        straight_through: float = 0.0,
        **shared: Any,
    ) -> None:
        super().__init__(width, heads, kv_heads, **shared)
        if not 0.0 <= straight_through < math.inf:
            raise ValueError(f"straight_through must be a temperature of at least 0, got {straight_through!r}")
        self.threshold, self.straight_through = threshold, straight_through

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        if self.straight_through == 0.0 or not (self.training and torch.is_grad_enabled()) or x.shape[1] == 0:
            return super().attend(x, query, key, value, context)
        log_gate = self.log_gate(x)
        key, value, _ = self.remembered(key, value, context)
        context.note(query, key, 1 / math.sqrt(self.head_width), None, self.threshold, log_gate)
        scores = dense_scores(query, key, context._replace(terms=None))
        visible = context.visible(query, key)
        weights = straight_through_weights(scores, log_gate, visible, self.threshold, self.straight_through)
        return dense_mix(weights, value, self.active_dropout(context))

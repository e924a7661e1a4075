"""The contract of a mechanism, and everything that all mechanisms share: only the rule differs between them."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.cache import Cache
from tra.ops.visibility import check_masks, visible_keys


class Context(NamedTuple):
    """What comes with the new tokens: the cache of earlier ones, and the masks ``[B, cached + L]`` of them all."""

    cache: Cache | None = None
    key_mask: Tensor | None = None
    segment_ids: Tensor | None = None

    @property
    def cached(self) -> int:
        """How many tokens the cache holds: the position of the first new one, until that is remembered."""
        return 0 if self.cache is None else len(self.cache)

    def remember(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of all tokens so far, given those of the new ones."""
        return tensors if self.cache is None else self.cache.append(*tensors)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Which of all keys each new query may see, ``[B or 1, 1, Lq, Lk]``."""
        return visible_keys(query.shape[2], key.shape[2], self.key_mask, self.segment_ids, query.device)


class Attention(nn.Module, ABC):
    """Multi-head causal self-attention whose rule is a subclass.

    Args:
        width: width of the input and output.
        heads: number of query heads; each is ``width // heads`` wide.
        kv_heads: number of key and value heads (grouped-query attention), ``heads`` by default.
        dropout: probability of dropping an attention weight in training.
        qk_norm: normalise each head's query and key to root mean square 1, without a learned scale.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        dropout: float = 0.0,
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or width < 1 or width % heads:
            raise ValueError(f"width must be a multiple of heads ({heads}), got {width}")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads ({heads}), got {kv_heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be a probability in [0, 1), got {dropout!r}")
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.dropout, self.qk_norm = dropout, qk_norm
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width)

    @abstractmethod
    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """The rule: ``[B, Hq, L, D]`` queries and ``[B, Hkv, L, D]`` keys and values of the new tokens in,
        ``[B, Hq, L, D]`` out. What later tokens need goes through ``context.remember``. Linear in value."""

    def forward(
        self,
        x: Tensor,
        *,
        cache: Cache | None = None,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Map ``[B, L, width]`` to the same shape.

        With a cache, x holds the new tokens only, and ``key_mask`` and ``segment_ids`` ``[B, cached + L]`` cover
        the cached ones too. ``key_mask`` is False for padding; ``segment_ids`` keeps packed documents apart.
        Mechanisms that measure plain distance count padding between tokens; at the ends it changes nothing.
        """
        context = Context(cache, key_mask, segment_ids)
        mixed = self.attend(x, *self._project(x, context), context)
        return self.output(self.finished(mixed).transpose(1, 2).flatten(2))

    def located(self, x: Tensor, context: Context) -> Tensor:
        """What queries and keys are projected from: x itself, unless the mechanism adds positions to it."""
        return x

    def finished(self, mixed: Tensor) -> Tensor:
        """What enters the output projection: the mixed values ``[B, Hq, L, D]``, unless the mechanism rescales them."""
        return mixed

    def weights(self, x: Tensor, *, key_mask: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """The attention matrix ``[B, Hq, L, L]``: what the rule makes of an identity matrix as values."""
        context = Context(key_mask=key_mask, segment_ids=segment_ids)
        query, key, _ = self._project(x, context)
        identity = torch.eye(x.shape[1], dtype=key.dtype, device=key.device)
        identity = identity.expand(*key.shape[:2], -1, -1)
        was_training, self.training = self.training, False
        try:
            return self.attend(x, query, key, identity, context)
        finally:
            self.training = was_training

    def _project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        # Before anything enters the cache: a wrong mask must not leave it half-filled.
        check_masks(context.key_mask, context.segment_ids, x.shape[0], context.cached + x.shape[1], x.device)
        located = self.located(x, context)
        query, key, value = (
            projection(source).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection, source in ((self.query, located), (self.key, located), (self.value, x))
        )
        if self.qk_norm:
            query = F.rms_norm(query, (self.head_width,))
            key = F.rms_norm(key, (self.head_width,))
        return query, key, value

    @property
    def active_dropout(self) -> float:
        return self.dropout if self.training else 0.0


def causal_softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, context: Context, *, dropout: float, bias: Tensor | None = None
) -> Tensor:
    """Softmax attention through PyTorch's SDPA; exactly 0 for a query that sees no key.

    ``bias``, broadcast to ``[B, Hq, Lq, Lk]``, is added to the scores.
    """
    queries, keys = query.shape[2], key.shape[2]
    masked = any(x is not None for x in (bias, context.key_mask, context.segment_ids))
    is_causal, mask = False, None
    if not masked and queries == keys:
        is_causal = True
    elif masked or queries != 1:
        mask = context.visible(query, key)
        if bias is not None:
            mask = bias.masked_fill(~mask, -math.inf).to(query.dtype)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def distances(query: Tensor, key: Tensor) -> Tensor:
    """How many tokens back each key lies, ``[Lq, Lk]``; the last query is aligned with the last key."""
    position = torch.arange(key.shape[2], device=query.device)
    return position[key.shape[2] - query.shape[2] :, None] - position

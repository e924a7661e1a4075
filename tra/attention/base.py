"""The contract of a mechanism, and everything that all mechanisms share. Only the rule differs."""

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tra.attention import flex
from tra.attention.cache import StaticCache, WeightProbeCache
from tra.attention.cache_shards import reading_all_keys
from tra.attention.context import Context
from tra.attention.dense import dense_mix

PAIRS_AT_ONCE = 1 << 26
"""Of rows and keys, of which a matrix says who sees whom: beyond, it is made piece by piece, and again in backward."""
NOT_SHARED = "its tokens change what earlier ones have stored, which other processes hold"
"""Why a mechanism that ``revises_cache`` refuses sequences that processes share."""


class Attention(nn.Module, ABC):
    """Multi-head causal self-attention; a subclass defines the rule.

    A subclass takes the same arguments and its options, which are keyword-only:
    ``(width, heads, kv_heads=None, *, theta=500_000.0, **shared)``.

    Args:
        width: width of the input and output.
        heads: number of query heads.
        kv_heads: number of key and value heads (grouped-query attention), ``heads`` by default.
        layer: index of the decoder's block, from 0. Given by the decoder, so no option.
        dropout: probability of dropping an attention weight in training. Given by the decoder, so no option.
        head_width: width of each head, ``width // heads`` by default. Given by the decoder, so no option.
        bias: True gives all four projections a bias, False none; by default only the output has one. Given by the
            decoder, so no option.
        qk_norm: normalise each head's query and key to root mean square 1, without a learned scale.
    """

    revises_cache: ClassVar[bool] = False
    """Whether later tokens change cached values of earlier ones; such a cache cannot be cropped."""

    takes_shards: ClassVar[bool] = False
    """Whether it asks other processes for keys by itself where they share sequences; if not, it gets those of all
    processes before it, as from a cache."""

    takes_static_cache: ClassVar[bool] = False
    """Whether it reads buffers of a fixed size (:class:`~tra.attention.cache.StaticCache`)."""

    uses_sdpa: ClassVar[bool] = False
    """Whether PyTorch's scaled_dot_product_attention computes the rule."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        layer: int = 0,
        dropout: float = 0.0,
        head_width: int | None = None,
        bias: bool | None = None,
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or width < 1 or (head_width is None and width % heads):
            raise ValueError(f"width must be a multiple of heads ({heads}), got {width}")
        head_width = width // heads if head_width is None else head_width
        if head_width < 1:
            raise ValueError(f"head_width must be at least 1, got {head_width}")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads ({heads}), got {kv_heads}")
        if layer < 0:
            raise ValueError(f"layer must be at least 0, got {layer}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be a probability in [0, 1), got {dropout!r}")
        self.width, self.heads, self.kv_heads, self.head_width = width, heads, kv_heads, head_width
        self.layer, self.dropout, self.qk_norm = layer, dropout, qk_norm
        self.query = nn.Linear(width, heads * head_width, bias=bias is True)
        self.key = nn.Linear(width, kv_heads * head_width, bias=bias is True)
        self.value = nn.Linear(width, kv_heads * head_width, bias=bias is True)
        self.output = nn.Linear(heads * head_width, width, bias=bias is not False)

    @abstractmethod
    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """The rule: ``[B, Hq, L, D]`` queries and ``[B, Hkv, L, D]`` keys and values of the new tokens in,
        ``[B, Hq, L, D]`` out. Tensors that later tokens need go through ``context.remember``. Linear in value."""

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Map ``[B, L, width]`` to the same shape; with a cache in the context, x holds the new tokens only.

        Mechanisms with plain distance count padding between tokens. Padding at the ends changes nothing.
        """
        context = self._fitting(x, context)
        if context.shards is not None and (not self.takes_shards or len(context.cache or ())):
            if self.revises_cache:
                raise ValueError(f"attention must not be {type(self).__name__} in context_parallel: {NOT_SHARED}")
            context = reading_all_keys(context)
        if isinstance(context.cache, StaticCache) and not self.takes_static_cache:
            raise ValueError(
                f"cache must not be static for {type(self).__name__}, whose rule needs the number of tokens"
            )
        projected = self.project(x, context)
        probed = None if context.weights is None else self._probed(x, *projected, context)
        mixed = self.attend(x, *projected, context)
        if probed is not None and context.weights is not None:
            weights, values = probed
            context.weights.append(weights)
            if weights.requires_grad:  # whoever asked for them may ask for their gradients, which must pass through
                mixed = dense_mix(weights, values, self.active_dropout(context))
        return self.output(self.postprocess(mixed).transpose(1, 2).flatten(2))

    def add_positions(self, x: Tensor, context: Context) -> Tensor:
        """The input of the query and key projections: x itself, unless the mechanism adds positions."""
        return x

    def postprocess(self, mixed: Tensor) -> Tensor:
        """The input of the output projection: the mixed values ``[B, Hq, L, D]``, rescaled by some mechanisms."""
        return mixed

    def gates(self, x: Tensor) -> Tensor | None:
        """``[B, heads, L]`` in (0, 1): the learned gate that each head reads at each token, None without one."""
        return None

    def weights(self, x: Tensor, context: Context | None = None) -> Tensor:
        """The attention matrix ``[B, Hq, L, cached + L]``, always exact. The cache does not change."""
        context = self._fitting(x, context)
        return self._probed(x, *self.project(x, context), context)[0]

    def active_dropout(self, context: Context) -> float:
        """The probability with which this call drops a weight."""
        return self.dropout if self.training and not context.exact else 0.0

    def _probed(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The weights (the rule's output for an identity matrix as values), and the values of all tokens."""
        if context.shards is not None:  # all weights need all keys
            context = reading_all_keys(context)
        probe = WeightProbeCache(context.cache, value, key.dtype)
        mask = context.key_mask
        if mask is not None and isinstance(context.cache, StaticCache):  # of which the probe gives what is filled
            mask = mask[:, : len(context.cache) + x.shape[1]]
        weights = self.attend(x, query, key, value, context._replace(cache=probe, key_mask=mask, exact=True))
        return weights, probe.values

    def _fitting(self, x: Tensor, context: Context | None) -> Context:
        if context is None:
            context = Context()
        if not isinstance(context, Context):
            raise ValueError(f"context must be a Context, got {type(context).__name__}")
        check_stream("x", x, self.width)
        context.check(x)
        return context

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the new tokens, as `attend` gets them."""
        placed = self.add_positions(x, context)
        batch, length = x.shape[:2]
        shape, kv_shape = ((batch, length, heads, self.head_width) for heads in (self.heads, self.kv_heads))
        query = self.query(placed).reshape(shape).transpose(1, 2)
        key = self.key(placed).reshape(kv_shape).transpose(1, 2)
        value = self.value(x).reshape(kv_shape).transpose(1, 2)
        return self.normalised(query), self.normalised(key), value

    def normalised(self, x: Tensor) -> Tensor:
        """Queries or keys ``[B, H, L, D]``, normalised to root mean square 1 if ``qk_norm`` is on."""
        return F.rms_norm(x, (self.head_width,)) if self.qk_norm else x


def check_stream(name: str, x: Tensor, width: int) -> None:
    """Raise a ValueError unless x is a floating-point tensor ``[B, L, width]``."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor [B, L, {width}], got {type(x).__name__}")
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"{name} must have the shape [B, L, {width}], got {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}")


def causal_softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Context,
    *,
    dropout: float,
    bias: Tensor | flex.Bias | None = None,
) -> Tensor:
    """Softmax attention through PyTorch's SDPA; exactly 0 for a query that sees no key.

    ``bias`` is added to the scores: a tensor that broadcasts to ``[B, Hq, Lq, Lk]``, or a function that gives each
    entry, so that FlexAttention need not hold all of them.
    """
    queries, keys = query.shape[2], key.shape[2]
    masked = any(x is not None for x in (bias, context.key_mask, context.segment_ids, context.key_lengths(1)))
    if masked and not isinstance(bias, Tensor) and flex.suits(query, context, dropout):
        return flex.biased_attention(query, key, value, context, bias)
    if bias is not None and not isinstance(bias, Tensor):
        bias = flex.all_biases(bias, query, key)
    context.note(query, key, 1 / math.sqrt(query.shape[3]), bias)
    is_causal, mask = False, None
    if not masked and queries == keys:
        is_causal = True
    elif not masked and queries > 1 and not torch.compiler.is_compiling() and queries * keys > PAIRS_AT_ONCE:
        return _by_pieces_of_rows(query, key, value, context, dropout)
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


def _by_pieces_of_rows(query: Tensor, key: Tensor, value: Tensor, context: Context, dropout: float) -> Tensor:
    """As `causal_softmax_attention`: SDPA must be told in a matrix what new tokens see, unless they are all tokens."""
    first, rows = key.shape[2] - query.shape[2], max(1, PAIRS_AT_ONCE // key.shape[2])
    pieces, end = [], first
    for piece in query.split(rows, dim=2):
        end += piece.shape[2]
        seen = key[:, :, :end], value[:, :, :end], context._replace(terms=None)
        of_piece = partial(causal_softmax_attention, dropout=dropout)
        pieces.append(checkpoint(of_piece, piece, *seen, use_reentrant=False))
    return torch.cat(pieces, 2)


def distances(query: Tensor, key: Tensor) -> Tensor:
    """How many tokens back each key lies, ``[Lq, Lk]``; the last query is aligned with the last key."""
    position = torch.arange(key.shape[2], device=query.device)
    return position[key.shape[2] - query.shape[2] :, None] - position

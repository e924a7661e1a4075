"""Softmax attention with a bias on PyTorch's FlexAttention: on a GPU, where a bias for every pair of tokens would take
memory that is quadratic in the length, each is computed where it is added; so are masks of padding and documents."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tra.attention.context import Context

if TYPE_CHECKING:  # which imports the compiler: only who needs it should wait
    from torch.nn.attention.flex_attention import BlockMask

Bias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""What is added to the score, given the numbers of the sequence, the head, the query and the key. Queries are counted
from the first key."""


def suits(query: Tensor, context: Context, dropout: float) -> bool:
    """Whether FlexAttention computes this call: prefill or training on a GPU. It supports no dropout and records no
    terms, and the bias of one new token is small."""
    fits = query.is_cuda and dropout == 0.0 and query.shape[2] > 1
    return fits and not context.exact and context.terms is None and context.key_lengths(1) is None


def all_biases(bias: Bias, query: Tensor, key: Tensor) -> Tensor:
    """The same bias in memory, broadcast to ``[B, Hq, Lq, Lk]``."""
    sequence, head, position = (torch.arange(size, device=query.device) for size in (*query.shape[:2], key.shape[2]))
    of_query = position[key.shape[2] - query.shape[2] :]
    return bias(sequence[:, None, None, None], head[None, :, None, None], of_query[:, None], position)


def biased_attention(query: Tensor, key: Tensor, value: Tensor, context: Context, bias: Bias | None) -> Tensor:
    """As `causal_softmax_attention` with that bias."""
    first = key.shape[2] - query.shape[2]

    def with_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score if bias is None else score + bias(b, h, q + first, k)

    return _flex()(
        query,
        key,
        value,
        score_mod=with_bias,
        block_mask=_visible(query, key, context),
        enable_gqa=query.shape[1] != key.shape[1],
    )


@lru_cache
def _flex() -> Callable[..., Any]:
    """Compiled: in eager mode it would hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _visible(query: Tensor, key: Tensor, context: Context) -> "BlockMask":
    """Which blocks of keys each block of queries may see, as `Context.visible` has it for every pair."""
    queries, keys, device = query.shape[2], key.shape[2], query.device
    key_mask, segments = context.key_mask, context.segment_ids
    if key_mask is None and segments is None:
        return _causal(queries, keys, device)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = q + keys - queries >= k
        if key_mask is not None:
            found = found & key_mask[b, k]
        if segments is not None:
            found = found & (segments[b, q + keys - queries] == segments[b, k])
        return found

    return _blocks(seen, query.shape[0], queries, keys, device)


@lru_cache(maxsize=16)
def _causal(queries: int, keys: int, device: torch.device) -> "BlockMask":
    return _blocks(lambda b, h, q, k: q + keys - queries >= k, None, queries, keys, device)


def _blocks(seen: Bias, batch: int | None, queries: int, keys: int, device: torch.device) -> "BlockMask":
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiled on a GPU, where every pair would not fit.
    return create_block_mask(seen, batch, None, queries, keys, device=str(device), _compile=device.type == "cuda")

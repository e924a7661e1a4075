"""What a call gets beside its tokens: the cache, the masks, and lists for those who inspect the rule."""

from typing import Any, NamedTuple

from torch import Tensor

from tra.attention.cache import Cache, StaticCache
from tra.distributed import ContextParallel
from tra.distributed.processes import Layout
from tra.ops.visibility import check_masks, visible_keys


class Terms(NamedTuple):
    """What a rule computed its weights from: the scores ``scale * query . key``, and what changes them."""

    query: Tensor
    """``[B, Hq, L, D]``."""
    key: Tensor
    """``[B, Hkv, L, D]``."""
    scale: float
    bias: Tensor | None = None
    """Added to the scores, broadcast to ``[B, Hq, L, L]``."""
    threshold: float | Tensor | None = None
    """A key is kept if its score is greater; a tensor broadcasts to ``[B, Hq, L]``, None keeps all."""
    log_gate: Tensor | None = None
    """``[B, Hq, L]``: what each step of distance, counted among the keys kept, adds to a score."""


class Context(NamedTuple):
    """What a call gets beside its new tokens: the cache of earlier tokens, and masks of all tokens.

    Example:
        >>> import tra
        >>> attention = tra.ThresholdRelativeAttention(width=64, heads=4)
        >>> key_mask = torch.arange(10).expand(2, 10) >= torch.tensor([[0], [3]])
        >>> attention(torch.randn(2, 10, 64), Context(key_mask=key_mask)).shape
        torch.Size([2, 10, 64])
    """

    cache: Cache | None = None
    """This layer's cache of earlier tokens; the call adds the new ones."""
    key_mask: Tensor | None = None
    """``[B, cached + L]`` boolean, False for padding; ``[B, capacity]`` with a `StaticCache`."""
    segment_ids: Tensor | None = None
    """``[B, cached + L]`` integers that keep packed documents apart."""
    exact: bool = False
    """The rule itself: no dropout, and nothing left out to save time."""
    terms: list[Terms] | None = None
    """If given, the rule appends its terms."""
    weights: list[Tensor] | None = None
    """If given, the call appends its attention matrix ``[B, Hq, L, cached + L]``."""
    shards: tuple[ContextParallel, Layout] | None = None
    """The processes that share these sequences, and their layout; None without sharing."""

    def check(self, x: Tensor) -> None:
        """Raise a ValueError that names what does not fit the new tokens ``x [B, L, width]``.

        Before anything enters the cache: a wrong mask must not leave it half-filled.
        """
        if isinstance(self.cache, list | tuple):
            raise ValueError(f"cache must be the Cache of one layer, got a {type(self.cache).__name__}")
        if isinstance(self.cache, StaticCache):
            if self.segment_ids is not None:
                raise ValueError("segment_ids must be None with a StaticCache, which holds one document for each row")
            keys = self.cache.capacity
        else:
            keys = len(self.cache or ()) + x.shape[1]
        check_masks(self.key_mask, self.segment_ids, x.shape[0], keys, x.device)

    @property
    def cached(self) -> int | Tensor:
        """How many tokens the cache holds: the position of the first new one, until that is remembered. A tensor, on
        the device, for a `StaticCache`."""
        if isinstance(self.cache, StaticCache):
            return self.cache.length
        return 0 if self.cache is None else len(self.cache)

    def key_lengths(self, batch: int) -> Tensor | None:
        """``[B]``: how many of the keys of a `StaticCache` there are, once the new ones are remembered; None for all
        keys, where there is no such cache."""
        return self.cache.length.expand(batch).contiguous() if isinstance(self.cache, StaticCache) else None

    def remember(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of all tokens so far, given those of the new ones."""
        return tensors if self.cache is None else self.cache.append(*tensors)

    def note(self, *terms: Any) -> None:
        """Append the :class:`Terms` of the rule, if a list was given."""
        if self.terms is not None:
            self.terms.append(Terms(*terms))

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Which of all keys each new query may see, ``[B or 1, 1, Lq, Lk]``."""
        lengths = self.key_lengths(query.shape[0])
        return visible_keys(query.shape[2], key.shape[2], self.key_mask, self.segment_ids, query.device, lengths)

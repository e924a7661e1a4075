"""Stands in for a cache where processes share sequences: what earlier tokens stored comes from other processes."""

import torch
from torch import Tensor

from tra.attention.cache import Cache
from tra.attention.context import Context
from tra.distributed.attention import gather_all, gather_before
from tra.distributed.processes import ContextParallel, Layout


class ShardCache(Cache):
    """One layer's cache of the tokens before this process's shard, for any mechanism that reads all tokens.

    To a mechanism its shard is what comes after a cache, whose tokens the processes before it hold. Each process gets
    all of them, as in ring attention. Gradients go home. A mechanism that ``revises_cache`` must not use it.

    Args:
        shards: the processes. All of them call the model.
        layout: who holds which tokens: ``shards.layout(...)``, once for all layers.
        behind: where each process stores the tokens of all of them, for what is written after them. What it holds
            already comes before the tokens of the first process.
    """

    def __init__(self, shards: ContextParallel, layout: Layout, behind: Cache | None = None) -> None:
        super().__init__()
        self.shards, self.layout, self.behind = shards, layout, behind
        self.before = 0 if behind is None else len(behind)
        self._length = self.before + layout.span(layout.rank)[0]

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        begin, end = (self.before + edge for edge in self.layout.span(self.layout.rank))
        if len(self) != begin or new[0].shape[2] != end - begin:
            raise ValueError(f"a ShardCache takes the {end - begin} tokens of its shard once, got {new[0].shape[2]}")
        if self.behind is not None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            raise ValueError("cache must be None where processes share sequences and gradients are recorded")
        self._length = end
        if self.behind is None:
            return gather_before(self.shards, self.layout, *new)
        stored = self.behind.append(*gather_all(self.shards, self.layout, *new))
        return tuple(tensor[:, :, :end] for tensor in stored)

    def with_new(self, *new: Tensor) -> tuple[Tensor, ...]:
        found = gather_before(self.shards, self.layout, *new)
        return found if self.behind is None else self.behind.with_new(*found)


def reading_all_keys(context: Context) -> Context:
    """The context of a call that processes share, for a mechanism that knows nothing of them."""
    assert context.shards is not None
    shards, layout = context.shards
    held, end = len(context.cache or ()), layout.span(layout.rank)[1]
    key_mask, segment_ids = (None if mask is None else mask[:, :end] for mask in (layout.key_mask, layout.segments))
    if context.key_mask is not None and key_mask is not None:
        key_mask = torch.cat([context.key_mask[:, :held], key_mask], 1)
    cache = ShardCache(shards, layout, context.cache)
    return context._replace(cache=cache, key_mask=key_mask, segment_ids=segment_ids, shards=None)

"""Stands in for a cache where processes share sequences: what earlier tokens stored comes from other processes."""

import torch
from torch import Tensor

from tra.attention.cache import Cache
from tra.distributed.attention import gather_all, gather_before
from tra.distributed.processes import ContextParallel, Layout


class ShardCache(Cache):
    """One layer's cache of the tokens before this process's shard, for any mechanism that reads all tokens.

    To a mechanism its shard is what comes after a cache, whose tokens the processes before it hold. Each process gets
    all of them, as from PyTorch's own context parallelism of ``scaled_dot_product_attention`` (which works on CUDA
    only). Gradients go home. A mechanism that ``revises_cache`` must not use it.

    Args:
        shards: the processes. All of them call the model.
        layout: who holds which tokens: ``shards.layout(...)``, once for all layers.
        behind: where all tokens of all processes are to be stored in each of them, for what is written after them.
    """

    def __init__(self, shards: ContextParallel, layout: Layout, behind: Cache | None = None) -> None:
        super().__init__()
        self.shards, self.layout, self.behind = shards, layout, behind
        self._length = layout.span(layout.rank)[0]

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        begin, end = self.layout.span(self.layout.rank)
        if len(self) != begin or new[0].shape[2] != end - begin:
            raise ValueError(f"a ShardCache takes the {end - begin} tokens of its shard once, got {new[0].shape[2]}")
        if self.behind is not None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            raise ValueError("behind must be None where gradients are recorded: what it stores has none")
        self._length = end
        if self.behind is None:
            return gather_before(self.shards, self.layout, *new)
        whole = gather_all(self.shards, self.layout, *new)
        self.behind.extend(*whole)
        return tuple(tensor[:, :, :end] for tensor in whole)

    def with_new(self, *new: Tensor) -> tuple[Tensor, ...]:
        return gather_before(self.shards, self.layout, *new)

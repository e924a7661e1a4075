"""A cache whose far part lies on another device: rows read it only if they reach it."""

import torch
from torch import Tensor

from tra.attention.cache import Cache
from tra.ops.threshold_relative.api import ROUNDING
from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.pieces import Piece, Rows, Walk

FIRST_FETCHED = 1024
"""Far keys that are fetched at first; twice as many each time after that."""


class FarCache(Cache):
    """The newest tokens where the model computes, all others on another device, as the host's memory for a GPU.

    Far keys are fetched, from near to far, for as long as a row needs them. For mechanisms that go through the operator
    of this package, with QK-norm.

    Args:
        near: how many of the newest tokens stay at least; up to twice as many do. The kernel sums up 192 keys at a
            time, so fewer than some hundreds would be read with far ones.
        device: of the others.

    Example:
        >>> cache = FarCache(near=4)
        >>> cache.extend(torch.zeros(1, 2, 30, 8), torch.zeros(1, 2, 30, 8))
        >>> len(cache), len(cache.far)
        (30, 26)
    """

    def __init__(self, near: int = 4096, device: torch.device | str = "cpu") -> None:
        super().__init__()
        if near < 1:
            raise ValueError(f"near must be at least 1, got {near}")
        self.near, self.device, self.far = near, torch.device(device), Cache()
        self.fetched = 0
        """Far keys that were fetched so far."""

    def __len__(self) -> int:
        return len(self.far) + self._length

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        raise ValueError("cache must not be a FarCache for a mechanism that reads all tokens, or one without QK-norm")

    def extend(self, *new: Tensor) -> None:
        """Store the new tokens, and move old ones away."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            raise ValueError("a FarCache records no gradients: use torch.no_grad() or inference_mode()")
        super().append(*new)
        if self._length > 2 * self.near:
            moved = self._length - self.near
            here = super().stored
            self.far.append(*(tensor[:, :, :moved].to(self.device) for tensor in here))
            # Copied, so that the memory of the others is free again.
            self._buffers, self._length = [tensor[:, :, moved:].clone() for tensor in here], self.near

    @property
    def here(self) -> tuple[Tensor, ...]:
        """The tensors of the newest tokens."""
        return super().stored

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors of all tokens, fetched and joined."""
        here = super().stored
        if not len(self.far):
            return here
        return tuple(torch.cat([far.to(x.device), x], dim=2) for far, x in zip(self.far.stored, here, strict=True))

    def fetch(self, low: int, high: int) -> tuple[Tensor, ...]:
        """Far tokens where the near ones are."""
        self.fetched += high - low
        device = self._buffers[0].device
        return tuple(tensor[:, :, low:high].to(device) for tensor in self.far.stored)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.far.select(rows)

    def crop(self, length: int) -> None:
        if length == 0:
            self.far.crop(0)
        if length < len(self.far):
            raise ValueError(f"length must be at least the {len(self.far)} tokens that were moved away, got {length}")
        super().crop(length - len(self.far))


def far_attention(
    cache: FarCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    *,
    threshold: float | Tensor,
    score_bound: float,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    impl: str = "auto",
    straight_through: float = 0.0,
) -> Tensor:
    """The operator's output for new tokens, whose keys and values enter the cache. It has no gradients, so
    ``straight_through`` changes nothing."""
    if segment_ids is not None or dropout > 0.0:
        raise ValueError("cache must not be a FarCache with packed documents or dropout")
    cache.extend(key, value)
    key, value = cache.here
    length, low = len(cache), len(cache.far)
    row_threshold = threshold.expand(query.shape[:3]) if isinstance(threshold, Tensor) else None
    number = 0.0 if isinstance(threshold, Tensor) else float(threshold)
    stop = ROUNDING if tolerance is None else min(float(tolerance), 1.0)
    inputs = Inputs(query, key, value, log_gate, None, None, None, row_threshold, None)
    options = Options(query.shape[3] ** -0.5, number, 0.0, 0.0, stop, score_bound)
    valid = None if key_mask is None else key_mask.sum(1)
    walk = Walk(Rows(inputs, options, length - query.shape[2], length, valid_keys=valid), impl=impl)

    def visit(key: Tensor, value: Tensor, low: int) -> None:
        own = None if key_mask is None else key_mask[:, low : low + key.shape[2]]
        before = None if key_mask is None else key_mask[:, :low].sum(1)
        walk.visit(Piece(key, value, low, own, before))

    visit(key, value, low)
    count = FIRST_FETCHED
    while not walk.done:
        high, low = low, max(0, low - count)
        key, value = cache.fetch(low, high)
        visit(key, value, low)
        count *= 2
    return walk.result().out

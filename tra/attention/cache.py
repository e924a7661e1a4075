"""What one attention layer remembers of earlier tokens."""

import torch
from torch import Tensor


class Cache:
    """Grows along the length dimension in amortised constant time per token.

    A mechanism decides what it stores: tensors ``[B, H, L, ...]``, always the same ones in the same order.

    Example:
        >>> cache = Cache()
        >>> key, value = cache.append(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
        >>> key, value = cache.append(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
        >>> key.shape, len(cache)
        (torch.Size([1, 2, 6, 8]), 6)
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Store the new tokens and return all tokens so far, one tensor per argument (views, not copies).

        Where gradients are recorded, they reach the tokens of earlier calls too, at the price of a copy for each call.
        """
        if self._buffers and new[0].shape[0] != self._buffers[0].shape[0]:
            raise ValueError(
                f"cache holds a batch of {self._buffers[0].shape[0]}, got new tokens for a batch of {new[0].shape[0]}"
            )
        length = self._length + new[0].shape[2]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*new, *self._buffers)):
            self._buffers, self._length = list(self.with_new(*new)), length
            return tuple(self._buffers)
        self._reserve(length, new)
        for buffer, tensor in zip(self._buffers, new, strict=True):
            buffer.narrow(2, self._length, length - self._length).copy_(tensor)  # in half the time of an assignment
        self._length = length
        return self.stored

    def extend(self, *new: Tensor) -> None:
        """Store the new tokens."""
        self.append(*new)

    def with_new(self, *new: Tensor) -> tuple[Tensor, ...]:
        """The tensors of all tokens so far and of the new ones, which are not stored."""
        if not self._length:
            return new
        return tuple(torch.cat(pair, dim=2) for pair in zip(self.stored, new, strict=True))

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors of all tokens so far (views), none before anything is stored."""
        return tuple([buffer.narrow(2, 0, self._length) for buffer in self._buffers])

    @property
    def batch(self) -> int:
        """Rows of the batch, 0 before anything is stored."""
        return self._buffers[0].shape[0] if self._buffers else 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch in this order; a row may come more than once."""
        self._buffers = [buffer.index_select(0, rows.to(buffer.device)) for buffer in self._buffers]

    def crop(self, length: int) -> None:
        """Forget all tokens but the first ``length``.

        Not for a mechanism that has ``revises_cache``, as selective attention has: what the others store would still
        bear the marks of the tokens forgotten.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"length must be between 0 and the {self._length} tokens in the cache, got {length}")
        self._length = length

    def _reserve(self, length: int, like: tuple[Tensor, ...]) -> None:
        # What was made under inference mode cannot be written to outside it, and what gradients need not at all.
        writable = bool(self._buffers) and (
            torch.compiler.is_compiling()  # where nobody can ask
            or torch.is_inference_mode_enabled()
            or not self._buffers[0].is_inference()
        )
        if writable and not self._buffers[0].requires_grad and self._buffers[0].shape[2] >= length:
            return
        old = self._buffers
        self._buffers = self._new_buffers(max(length, 2 * old[0].shape[2] if old else 0), like)
        for buffer, stored in zip(self._buffers, old, strict=bool(old)):
            buffer[:, :, : self._length] = stored[:, :, : self._length]

    def _new_buffers(self, capacity: int, like: tuple[Tensor, ...]) -> list[Tensor]:
        return [tensor.new_empty(*tensor.shape[:2], capacity, *tensor.shape[3:]) for tensor in like]


class StaticCache(Cache):
    """Buffers of a fixed size that are written in place, with the number of tokens in a tensor: every step has the same
    shapes and addresses, so that a compiled one is compiled once and can be captured in a CUDA graph.

    Unlike a `Cache`, it gives whole buffers; what lies behind the tokens in them is 0. For mechanisms that
    ``takes_static_cache``.

    Args:
        capacity: the greatest number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.length = torch.zeros((), dtype=torch.long)
        """How many tokens there are, on the device of the buffers."""

    def __len__(self) -> int:
        return int(self.length)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return tuple(self._buffers)

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        if not self._buffers:
            self._buffers = [tensor.new_zeros(*tensor.shape[:2], self.capacity, *tensor.shape[3:]) for tensor in new]
            self.length = self.length.to(new[0].device)
        if new[0].shape[0] != self.batch:
            raise ValueError(f"cache holds a batch of {self.batch}, got new tokens for a batch of {new[0].shape[0]}")
        tokens = new[0].shape[2]
        if not torch.compiler.is_compiling() and len(self) + tokens > self.capacity:
            raise ValueError(
                f"cache must have room for {len(self)} + {tokens} tokens, but its capacity is {self.capacity}"
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            raise ValueError("cache must not be static where gradients are wanted: it keeps none; use Cache or no_grad")
        place = self.length + torch.arange(tokens, device=self.length.device)
        for buffer, tensor in zip(self._buffers, new, strict=True):
            buffer.index_copy_(2, place, tensor.detach())
        self.length.add_(tokens)
        return self.stored

    def with_new(self, *new: Tensor) -> tuple[Tensor, ...]:
        if not self._buffers:
            return new
        held = (buffer.narrow(2, 0, len(self)) for buffer in self._buffers)
        return tuple(torch.cat(pair, dim=2) for pair in zip(held, new, strict=True))

    def select(self, rows: Tensor) -> None:
        for index, buffer in enumerate(self._buffers):
            chosen = buffer.index_select(0, rows.to(buffer.device))
            if chosen.shape == buffer.shape:
                buffer.copy_(chosen)  # where a compiled step looks for it
            else:
                self._buffers[index] = chosen

    def crop(self, length: int) -> None:
        if not 0 <= length <= len(self):
            raise ValueError(f"length must be between 0 and the {len(self)} tokens in the cache, got {length}")
        self.length.fill_(length)
        for buffer in self._buffers:
            buffer[:, :, length:] = 0.0


class WeightProbeCache(Cache):
    """Stands in for a cache while weights are computed: it stores nothing, and in place of values it gives an identity
    matrix, of which the rule makes the weights.

    Args:
        cache: what is remembered of earlier tokens.
        value: the values of the new tokens, by which they are known among what is to be stored.
        dtype: of the weights.
    """

    def __init__(self, cache: Cache | None, value: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.behind = Cache() if cache is None else cache
        self.value, self.dtype = value, dtype
        self.values: Tensor
        """The values of all tokens, once the mechanism has asked for them."""

    def __len__(self) -> int:
        return len(self.behind)

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        found = list(self.behind.with_new(*new))
        place = next(place for place, tensor in enumerate(new) if tensor is self.value)
        self.values = found[place]
        identity = torch.eye(self.values.shape[2], dtype=self.dtype, device=self.values.device)
        found[place] = identity.expand(*self.values.shape[:2], -1, -1)
        return tuple(found)

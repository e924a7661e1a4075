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
        """Store the new tokens and return all tokens so far, one tensor per argument (views, not copies)."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            raise ValueError("cache is for inference: call the model under torch.no_grad() or inference_mode()")
        if self._buffers and new[0].shape[0] != self._buffers[0].shape[0]:
            raise ValueError(
                f"cache holds a batch of {self._buffers[0].shape[0]}, got new tokens for a batch of {new[0].shape[0]}"
            )
        length = self._length + new[0].shape[2]
        self._reserve(length, new)
        for buffer, tensor in zip(self._buffers, new, strict=True):
            buffer[:, :, self._length : length] = tensor
        self._length = length
        return tuple(buffer[:, :, :length] for buffer in self._buffers)

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
        # What was made under inference mode cannot be written to outside it.
        writable = bool(self._buffers) and (torch.is_inference_mode_enabled() or not self._buffers[0].is_inference())
        if writable and self._buffers[0].shape[2] >= length:
            return
        capacity = length if not self._buffers else max(length, 2 * self._buffers[0].shape[2])
        old = self._buffers or [tensor[:, :, :0] for tensor in like]
        self._buffers = [tensor.new_empty(*tensor.shape[:2], capacity, *tensor.shape[3:]) for tensor in like]
        for buffer, stored in zip(self._buffers, old, strict=True):
            buffer[:, :, : self._length] = stored[:, :, : self._length]

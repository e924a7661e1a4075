"""Every address that an interpreted Triton kernel touches, checked against the tensors of its launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter


class Touched:
    """Addresses that were read."""

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.times = 0
        """How often, counting what is read twice twice."""
        self.allowed: list[tuple[int, int]] = []

    def check(self, addresses: Any, mask: Any, size: int) -> np.ndarray:
        touched = np.unique(np.asarray(addresses).ravel()[np.asarray(mask).ravel().astype(bool)].astype(np.int64))
        inside = np.zeros(touched.shape, dtype=bool)
        for first, last in self.allowed:
            inside |= (touched >= first) & (touched + size <= last)
        assert inside.all(), f"{(~inside).sum()} accesses out of bounds"
        return touched

    def rows_read(self, tensor: Tensor) -> list[int]:
        """Places along the third dimension of [B, H, L, D] of which something was read."""
        strides = tensor.stride()
        size = tensor.element_size()
        places = {(address - tensor.data_ptr()) // size for address in self.read}
        inside = (place for place in places if 0 <= place < tensor.numel())
        return sorted({place // strides[2] % tensor.shape[2] for place in inside})


@contextmanager
def watched() -> Iterator[Touched]:
    """Within it an access outside of the tensors of a launch is an AssertionError."""
    touched = Touched()
    memory, prepare = interpreter._interpreter, interpreter.GridExecutor._init_args_hst

    class Watching:
        @staticmethod
        def load(addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
            found = touched.check(addresses, mask, np.dtype(dtype).itemsize)
            touched.read.update(found.tolist())
            touched.times += found.size
            return memory.load(addresses, mask, other, dtype)

        @staticmethod
        def store(addresses: Any, value: Any, mask: Any) -> Any:
            touched.check(addresses, mask, value.dtype.itemsize)
            return memory.store(addresses, value, mask)

        @staticmethod
        def atomic_rmw(operation: Any, addresses: Any, value: Any, mask: Any, order: Any) -> Any:
            touched.check(addresses, mask, value.dtype.itemsize)
            return memory.atomic_rmw(operation, addresses, value, mask, order)

    def prepared(executor: Any, arguments: Any, keywords: Any) -> Any:
        found = prepare(executor, arguments, keywords)
        given = [*found[0], *found[1].values()]
        touched.allowed = [_extent(x) for x in given if isinstance(x, Tensor) and x.numel() > 0]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", Watching)
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", prepared)
        yield touched


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

"""A group of processes as threads of this one: the same messages, without the time that processes take."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import Any, TypeVar

from torch import Tensor

from tra.distributed import ContextParallel, Traffic

Found = TypeVar("Found")


class ThreadsOfOneProcess(ContextParallel):
    """As many of these share `boxes`: of each message from one to another, its queue."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int, int], Queue[Tensor]], chunk: int) -> None:
        self.rank, self.size, self.boxes, self.chunk = rank, size, boxes, chunk
        self.traffic, self.posted = Traffic(), Counter[tuple[int, int]]()

    def _box(self, source: int, target: int) -> Queue[Tensor]:
        number = self.posted[source, target]
        self.posted[source, target] += 1
        return self.boxes.setdefault((source, target, number), Queue())

    def send(self, tensor: Tensor, peer: int) -> tuple[int, Any]:
        self.traffic.bytes += tensor.nbytes
        self._box(self.rank, peer).put(tensor.detach().clone())
        return peer, None

    def receive(self, tensor: Tensor, peer: int) -> tuple[int, Any]:
        assert tensor.is_contiguous()  # or gloo refuses it
        return peer, (self._box(peer, self.rank), tensor)

    def wait(self, *pending: tuple[int, Any]) -> None:
        for _, coming in pending:
            if coming is not None:
                box, tensor = coming
                sent = box.get(timeout=60)
                assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
                tensor.copy_(sent)


def in_threads(count: int, chunk: int, run: Callable[[ContextParallel], Found]) -> list[Found]:
    """What `run` returns in each of `count` threads, by rank; or the first error that is not of waiting for another."""
    boxes: dict[tuple[int, int, int], Queue[Tensor]] = {}
    with ThreadPoolExecutor(count) as pool:
        under_way = [pool.submit(run, ThreadsOfOneProcess(rank, count, boxes, chunk)) for rank in range(count)]
    errors = [error for one in under_way if (error := one.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, Empty)), errors[0])
    return [one.result() for one in under_way]

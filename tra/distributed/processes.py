"""The processes that share a sequence: who holds which tokens, and how they talk, on `torch.distributed` alone.

Every message is between two processes, so that whoever does not answer is known by its rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tra.errors import RunError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DATA, FAULT = 1, 2
"""Tags of messages."""


@dataclass
class Traffic:
    """What this process has sent for attention, and how far it had to ask."""

    bytes: int = 0
    """Of keys, values and their gradients."""
    rounds: int = 0
    """How often it asked for more keys."""
    hops: int = 0
    """How many neighbours away the farthest keys were, summed over calls."""
    calls: int = 0


@dataclass
class Layout:
    """Who holds which tokens of the sequences of one forward pass."""

    rank: int
    lengths: list[int]
    chunk: int
    """How many keys a process asks for at first; twice as many each time after that."""
    key_mask: Tensor | None = None
    """[B, L] of all tokens"""
    segments: Tensor | None = None
    """[B, L] int32: documents"""
    starts: Tensor | None = None
    """[B, L] int32: where each token's document begins"""
    edges: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.edges = [0, *accumulate(self.lengths)]
        self.requests = cache(self._requests)

    @property
    def length(self) -> int:
        return self.edges[-1]

    def span(self, rank: int) -> tuple[int, int]:
        return self.edges[rank], self.edges[rank + 1]

    def _requests(self, rank: int) -> list[tuple[int, int, int]]:
        """What a process asks for, one request after another: whom, and which keys [low, high)."""
        found, high, size, owner = [], self.edges[rank], self.chunk, rank - 1
        while high > 0:
            while self.edges[owner] >= high:
                owner -= 1
            low = max(self.edges[owner], high - size)
            found.append((owner, low, high))
            high, size = low, 2 * size
        return found

    def asks_at_all(self, rank: int) -> bool:
        """Whether a process needs keys of others: a document that begins in its shard does not."""
        begin, end = self.span(rank)
        if begin == 0:
            return False
        return self.starts is None or bool((self.starts[:, begin:end] < begin).any())


class ContextParallel:
    """Processes that hold consecutive shards of the same sequences.

    Args:
        group: a process group or a DeviceMesh of one dimension; all processes by default.
        timeout: seconds after which a process that does not answer is given up.
        chunk: how many keys a process asks its neighbour for at first. Each further request is twice as large.

    Example:
        Within processes that ``torchrun`` started, after ``dist.init_process_group("gloo")``::

            shards = ContextParallel()
            with context_parallel(shards):
                logits = model(shards.shard(tokens))  # of this process's tokens
    """

    def __init__(self, group: Any = None, *, timeout: float = 300.0, chunk: int = 1024) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "group must exist: call torch.distributed.init_process_group first, or start with torchrun"
            )
        if hasattr(group, "get_group"):
            group = group.get_group()
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk!r}")
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("group must hold this process")
        self.timeout, self.chunk = timedelta(seconds=timeout), chunk
        self.traffic = Traffic()
        self._notices: dict[int, tuple[Tensor, Any]] = {}
        if dist.get_backend(self.group) == "gloo":
            # Whoever finds a process gone tells the others, who may wait for somebody else at that moment.
            for peer in self._others():
                notice = torch.full((1,), -1)
                self._notices[peer] = notice, dist.irecv(notice, group=self.group, group_src=peer, tag=FAULT)

    def _others(self) -> Iterator[int]:
        return (peer for peer in range(self.size) if peer != self.rank)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This process's part of a tensor that all of them have, as even as can be."""
        length = tensor.shape[dim]
        if length < self.size:
            raise ValueError(f"a sequence must have at least a token for each of {self.size} processes, got {length}")
        begin, end = (length * rank // self.size for rank in (self.rank, self.rank + 1))
        return tensor.narrow(dim, begin, end - begin)

    def send(self, tensor: Tensor, peer: int) -> tuple[int, Any]:
        tensor = tensor.contiguous()
        self.traffic.bytes += tensor.nbytes
        with self._naming(peer):
            work = dist.isend(tensor, group=self.group, group_dst=peer, tag=DATA)
        return peer, (work, tensor)  # the tensor must live until it is sent

    def receive(self, tensor: Tensor, peer: int) -> tuple[int, Any]:
        with self._naming(peer):
            work = dist.irecv(tensor, group=self.group, group_src=peer, tag=DATA)
        return peer, (work, tensor)

    def wait(self, *pending: tuple[int, Any]) -> None:
        for peer, (work, _) in pending:
            with self._naming(peer):
                work.wait(self.timeout)

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, which have one shape."""
        before = self.traffic.bytes
        found = [tensor if peer == self.rank else torch.empty_like(tensor) for peer in range(self.size)]
        pending = [self.receive(found[peer], peer) for peer in self._others()]
        self.wait(*[self.send(tensor, peer) for peer in self._others()], *pending)
        self.traffic.bytes = before  # which counts keys and values
        return found

    @contextmanager
    def _naming(self, peer: int) -> Iterator[None]:
        """What fails in talking to a process, as an error that names the one that is gone."""
        try:
            yield
        except RuntimeError as error:
            gone = self._told_by(peer)
            self._tell(gone)
            whole = dist.get_global_rank(self.group, gone)
            reason = str(error).strip().partition("\n")[0]
            raise RunError(
                f"rank {whole} of the {self.size} processes that share a sequence is gone or gave no answer within "
                f"{self.timeout.total_seconds():g} s ({reason})"
            ) from error

    def _told_by(self, peer: int) -> int:
        """Who is gone: the one that this peer found gone before it ended, otherwise itself."""
        if peer not in self._notices:
            return peer
        notice, work = self._notices.pop(peer)
        try:
            # Its connection is closed, so this ends at once. To wait for anybody else could run out of time, upon
            # which gloo closes all connections, and nobody could be told.
            work.wait(timedelta(seconds=1))
        except RuntimeError:
            return peer  # it said nothing
        return int(notice)

    def _tell(self, gone: int) -> None:
        if dist.get_backend(self.group) != "gloo":
            return
        sent: list[Any] = []
        for peer in self._others():
            if peer != gone:
                try:
                    sent.append(dist.isend(torch.tensor([gone]), group=self.group, group_dst=peer, tag=FAULT))
                except RuntimeError:
                    continue  # gone as well
        for work in sent:
            try:
                work.wait(timedelta(seconds=2))
            except RuntimeError:
                continue

    def layout(
        self, tokens: Tensor, key_mask: Tensor | None = None, segment_ids: Tensor | None = None, cached: int = -1
    ) -> Layout:
        """Who holds what, once for all layers of a forward pass.

        Args:
            tokens: ``[B, n, ...]`` of this process, floating point.
            key_mask: ``[B, n]`` of this process.
            segment_ids: ``[B, n]`` of this process; the same number is the same document in all of them.
            cached: tokens in a cache that all of them have; -1 without a cache.
        """
        batch, count = tokens.shape[:2]
        device, dtype = tokens.device.type, tokens.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        mine = {
            "tokens": count,
            "batch size": batch,
            "dtype": DTYPES.index(dtype) if dtype in DTYPES else -1,
            "key_mask or none": int(key_mask is not None),
            "segment_ids or none": int(segment_ids is not None),
            "chunk": self.chunk,
            "number of cached tokens (-1 without a cache)": cached,
        }
        all_of_them = [each.tolist() for each in self.exchange(torch.tensor(list(mine.values())))]
        for rank, theirs in enumerate(all_of_them):
            if theirs[0] < 1:
                raise ValueError(f"every process must hold at least one token, rank {rank} holds none")
            for (name, here), there in zip(list(mine.items())[1:], theirs[1:], strict=True):
                if there != here:
                    said = [DTYPES[x] if name == "dtype" else x for x in (here, there)]
                    raise ValueError(
                        f"all shards must have the same {name}: {said[0]} at rank {self.rank}, {said[1]} at rank {rank}"
                    )
        layout = Layout(self.rank, [theirs[0] for theirs in all_of_them], self.chunk)
        if key_mask is not None:
            layout.key_mask = self._gathered(key_mask.byte(), layout).bool()
        if segment_ids is not None:
            ids = self._gathered(segment_ids.long(), layout)
            layout.segments = ids.unique(return_inverse=True)[1].int()
            place = torch.arange(layout.length, device=ids.device).expand_as(ids)
            first = place.new_full((batch, int(layout.segments.max()) + 1), layout.length)
            first.scatter_reduce_(1, layout.segments.long(), place, "amin")
            layout.starts = first.gather(1, layout.segments.long()).int()
        return layout

    def _gathered(self, tensor: Tensor, layout: Layout) -> Tensor:
        """``[B, L]`` from the ``[B, n]`` of each process."""
        most = max(layout.lengths)
        padded = torch.nn.functional.pad(tensor, (0, most - tensor.shape[1]))
        return torch.cat(
            [part[:, :count] for part, count in zip(self.exchange(padded), layout.lengths, strict=True)], 1
        )


# A plain global, which torch.compile can read; no variable of contextvars or of a thread is.
_current: ContextParallel | None = None


def current() -> ContextParallel | None:
    """The processes that share the sequences of this forward pass, None if they are whole."""
    return _current


@contextmanager
def context_parallel(shards: ContextParallel | None) -> Iterator[None]:
    """Within this, the tokens that a :class:`~tra.model.Decoder` is given are this process's shard of longer sequences.

    In the CPU kernel the operator's output has the bits of one process, whatever their number. So have its gradients of
    queries, gates and row thresholds; those of keys, values and a head's threshold are summed over rows in another
    order, the same but for rounding.
    """
    global _current
    before, _current = _current, shards
    try:
        yield
    finally:
        _current = before

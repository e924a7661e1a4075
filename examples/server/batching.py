"""Requests that are decoded together: they join and leave a batch while it runs.

Attention treats each sequence of a batch as if it were alone, so a request joins at any moment: its cache is put beside
the others, with padding on the left that nothing counts. One thread reads prompts, piece by piece, and between two
pieces writes one token of every request that is being written.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tra import Sampling
from tra.attention import Cache
from tra.errors import RunError
from tra.generation import check_finite
from tra.hub import TraForCausalLM
from tra.hub.cache import mechanisms_of
from tra.hub.generation import end_tokens, tokenizer_fingerprint

READ_AT_ONCE = 512
"""Tokens of a prompt that are read between two steps of those that are being written."""


class TooManyError(Exception):
    """No more requests may wait."""


@dataclass(eq=False)
class Request:
    """A prompt to be continued."""

    ids: list[int]
    new: int
    """Tokens at most."""
    sampling: Sampling
    seed: int
    tell: Callable[[int | str | Exception], object]
    """Is given each token, then "stop" or "length" or what went wrong; called in the batcher's thread."""
    gone: bool = False
    """Set by whoever no longer wants it."""
    shared: int = 0
    """Tokens of the prompt that a saved cache held."""


@dataclass(eq=False)
class Row:
    """A request that has a place."""

    request: Request
    caches: Sequence[Cache]
    """While the prompt is read; then it belongs to the batch."""
    generator: torch.Generator
    read: int = 0
    written: list[int] = field(default_factory=list)


class Batcher(threading.Thread):
    """Serves requests until it is closed.

    Args:
        model: writes.
        tokenizer: of the saved caches.
        places: requests that are read or written at the same time.
        waiting: requests that may wait for a place.
        prefixes: files that `tra generate --save-cache` wrote: a prompt that begins as one of them is read from there.
    """

    def __init__(
        self,
        model: TraForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        places: int = 8,
        waiting: int = 64,
        prefixes: Sequence[Path] = (),
    ) -> None:
        super().__init__(daemon=True, name="batcher")
        self.model, self.decoder, self.places, self.most_waiting = model, model.model.decoder, places, waiting
        mechanisms = mechanisms_of(self.decoder, len(self.decoder.blocks))
        # Mechanisms that know positions have them in their caches, which then belong to one place in a sequence.
        self.batches = all(mechanism.takes_shards for mechanism in mechanisms)
        self.crops = not any(mechanism.revises_cache for mechanism in mechanisms)
        self.end = set(end_tokens(model))
        self.prefixes = [self._prefix(path, tokenizer_fingerprint(tokenizer)) for path in prefixes]
        self.waiting, self.reading, self.groups = deque[Request](), deque[Row](), list[Group]()
        self.changed = threading.Condition()
        self.closed = False
        self.largest = 0
        """Requests that were written in one step, at most."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take all of these requests or, with a TooManyError, none."""
        with self.changed:
            if self.closed:
                raise TooManyError("the server is closing")
            if len(self.waiting) + len(requests) > self.most_waiting + max(0, self.places - self.busy):
                raise TooManyError(f"{len(self.waiting)} requests are waiting; try again")
            self.waiting.extend(requests)
            self.changed.notify()

    @property
    def busy(self) -> int:
        """Requests that have a place."""
        return len(self.reading) + sum(len(group.rows) for group in self.groups)

    def close(self) -> None:
        """End the thread; requests under way are told."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.join()

    def run(self) -> None:
        end: Exception = RunError("the server was closed")
        try:
            with torch.inference_mode():
                while self._admit():
                    if self.reading:
                        row = self.reading[0]
                        self._read(row)
                        # Prompts take turns, so that a short one does not wait for a long one, nor that for many.
                        if self.reading and self.reading[0] is row:
                            self.reading.rotate(-1)
                    for group in self.groups:
                        self._step(group)
                    self.groups = [group for group in self.groups if group.rows]
        except Exception as error:
            end = error
            raise
        finally:
            with self.changed:
                self.closed = True  # whoever comes from now on is told
            for request in [*self.waiting, *(row.request for row in self._rows())]:
                request.tell(end)

    def _rows(self) -> list[Row]:
        return [*self.reading, *(row for group in self.groups for row in group.rows)]

    def _admit(self) -> bool:
        """Give free places to those who wait, once there is something to do; False at the end."""
        with self.changed:
            self.waiting = deque(request for request in self.waiting if not request.gone)
            self.reading = deque(row for row in self.reading if not row.request.gone)
            for group in self.groups:
                group.leave([row for row in group.rows if row.request.gone])
            self.groups = [group for group in self.groups if group.rows]
            self.changed.wait_for(lambda: self.closed or self.waiting or self.busy)
            free = 0 if self.closed else self.places - self.busy
            admitted = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        for request in admitted:
            try:
                self.reading.append(self._place(request))
            except Exception as error:  # no memory for it, say
                request.tell(error)
        return not self.closed

    def _place(self, request: Request) -> Row:
        caches = self.decoder.new_cache()
        request.shared = self._shared(request.ids, caches)
        generator = torch.Generator(self.model.device).manual_seed(request.seed)
        return Row(request, caches, generator, request.shared)

    def _read(self, row: Row) -> None:
        """One piece of a prompt; after its last the request joins a batch."""
        ids = row.request.ids[row.read : row.read + READ_AT_ONCE]
        try:
            scores = self._scores(torch.tensor([ids]), row.caches, None)
            row.read += len(ids)
            if row.read < len(row.request.ids):
                return
            self.reading.remove(row)
            if self._goes_on(row, scores[0]):
                if not self.groups or not self.batches:
                    self.groups.append(Group(row))
                else:
                    self.groups[0].join(row)
        except Exception as error:
            if row in self.reading:
                self.reading.remove(row)
            row.request.tell(error)

    def _step(self, group: "Group") -> None:
        """One token of every request of a batch."""
        self.largest = max(self.largest, len(group.rows))
        try:
            last = torch.tensor([[row.written[-1]] for row in group.rows])
            scores = self._scores(last, group.caches, group.key_mask())
            ended = [row for row, own in zip(group.rows, scores, strict=True) if not self._goes_on(row, own)]
            group.leave(ended)
        except Exception as error:  # whose it is nobody knows
            for row in group.rows:
                row.request.tell(error)
            group.rows = []

    def _scores(self, tokens: Tensor, caches: Sequence[Cache], key_mask: Tensor | None) -> Tensor:
        device = self.model.device
        mask = None if key_mask is None else key_mask.to(device)
        hidden = self.decoder.hidden(tokens.to(device), cache=caches, key_mask=mask)
        return self.model.lm_head(hidden[:, -1]).float()

    def _goes_on(self, row: Row, scores: Tensor) -> bool:
        """Choose the next token of a row, which has its own generator, and tell it."""
        request = row.request
        try:
            check_finite(scores, len(request.ids) + len(row.written) + 1)
            token = int(request.sampling.choose(scores[None], row.generator))
        except Exception as error:
            request.tell(error)
            return False
        row.written.append(token)
        request.tell(token)
        if token in self.end or len(row.written) == request.new:
            request.tell("stop" if token in self.end else "length")
            return False
        return True

    def _prefix(self, path: Path, fingerprint: str) -> tuple[list[int], Sequence[Cache]]:
        caches, tokens = self.decoder.load_cache(path, tokenizer=fingerprint)
        if tokens is None or tokens.shape != (1, len(caches[0])):
            raise RunError(f"{path} must hold one sequence and its tokens to be a prefix")
        return tokens[0].tolist(), caches

    def _shared(self, ids: list[int], caches: Sequence[Cache]) -> int:
        """Fill caches with as much of a prompt as a saved one holds, but its last token, whose scores are wanted."""
        best, found = 0, None
        for tokens, saved in self.prefixes:
            pairs = zip(ids[:-1], tokens, strict=False)
            common = next((at for at, (own, other) in enumerate(pairs) if own != other), min(len(ids) - 1, len(tokens)))
            if common > best and (self.crops or common == len(tokens)):
                best, found = common, saved
        for cache, other in zip(caches, found or (), strict=False):
            cache.append(*(tensor[:, :, :best] for tensor in other.stored))
        return best


class Group:
    """Requests that are written in the same step, and their caches in one batch, whose last columns are the newest."""

    def __init__(self, row: Row) -> None:
        self.rows, self.caches = [row], row.caches

    def lengths(self) -> list[int]:
        """Tokens in the cache of each row: all that was written but the last."""
        return [len(row.request.ids) + len(row.written) - 1 for row in self.rows]

    def key_mask(self) -> Tensor | None:
        """``[B, cached + 1]``, False for what fills up shorter rows on the left."""
        columns, lengths = len(self.caches[0]), torch.tensor(self.lengths())
        if bool((lengths == columns).all()):
            return None
        return torch.arange(columns + 1) >= columns - lengths[:, None]

    def join(self, row: Row) -> None:
        joined = []
        for cache, other in zip(self.caches, row.caches, strict=True):
            columns = max(len(cache), len(other))
            both = zip(cache.stored, other.stored, strict=True)
            joined.append(Cache())
            joined[-1].append(*(torch.cat([_padded(one, columns), _padded(two, columns)]) for one, two in both))
        self.rows.append(row)
        self.caches = joined

    def leave(self, rows: Sequence[Row]) -> None:
        """Free the places of these, and of the columns that only they needed if that is much."""
        if not rows:
            return
        kept = torch.tensor([place for place, row in enumerate(self.rows) if row not in rows], dtype=torch.long)
        self.rows = [row for row in self.rows if row not in rows]
        if not self.rows:
            self.caches = []
            return
        columns = max(self.lengths())
        if columns > len(self.caches[0]) // 2:
            columns = len(self.caches[0])
        left = [Cache() for _ in self.caches]
        for cache, old in zip(left, self.caches, strict=True):
            stored = (tensor[:, :, len(old) - columns :] for tensor in old.stored)
            cache.append(*(tensor.index_select(0, kept.to(tensor.device)) for tensor in stored))
        self.caches = left


def _padded(tensor: Tensor, columns: int) -> Tensor:
    """``[B, H, L, ...]`` with so many columns, zeros on the left."""
    missing = columns - tensor.shape[2]
    return F.pad(tensor, [0, 0] * (tensor.dim() - 3) + [missing, 0]) if missing else tensor

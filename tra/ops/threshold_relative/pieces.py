"""The operator over a sequence whose keys come in pieces, from near to far.

A row needs nothing of the keys behind it but what it has summed up and counted, so its walk can stop at any key and go
on when the next ones are at hand, here or in another process. A row that is done asks for no more of them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tra.ops.threshold_relative import cpu, triton
from tra.ops.threshold_relative import reference_pieces as reference
from tra.ops.threshold_relative.call import Inputs, Options, Result, refuse_positive_gates
from tra.ops.threshold_relative.implementations import choose
from tra.ops.visibility import check_masks


@dataclass
class Piece:
    """Consecutive keys and values of a sequence.

    Args:
        key: ``[B, Hkv, n, D]``.
        value: ``[B, Hkv, n, Dv]``.
        start: the place of the first one in the sequence.
        key_mask: ``[B, n]`` boolean, False for padding.
        valid_before: ``[B]`` integers: how many keys before `start` are no padding. None: all.
        segment_ids: ``[B, n]`` int32.
    """

    key: Tensor
    value: Tensor
    start: int
    key_mask: Tensor | None = None
    valid_before: Tensor | None = None
    segment_ids: Tensor | None = None
    grad_key: Tensor | None = None
    """Where a backward walk adds its gradients; zeros at first."""
    grad_value: Tensor | None = None
    waits_before: Tensor | None = None
    """[B]: keys before this place are masked in the call, and come again in the next one."""

    def __post_init__(self) -> None:
        if self.key.shape[:3] != self.value.shape[:3] or self.key.dtype != self.value.dtype:
            raise ValueError(
                f"value must have the [B, Hkv, n] and dtype of key, {list(self.key.shape[:3])} and {self.key.dtype}, "
                f"got {list(self.value.shape[:3])} and {self.value.dtype}"
            )
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}")
        check_masks(self.key_mask, self.segment_ids, self.key.shape[0], self.key.shape[2], self.key.device)
        if self.segment_ids is not None and self.segment_ids.dtype != torch.int32:
            raise ValueError(f"segment_ids must be int32, got {self.segment_ids.dtype}")

    def __len__(self) -> int:
        return self.key.shape[2]

    def with_gradients(self) -> "Piece":
        """The same, with room for gradients in float32 or wider."""
        wide = torch.promote_types(self.key.dtype, torch.float32)
        self.grad_key = torch.zeros_like(self.key, dtype=wide)
        self.grad_value = torch.zeros_like(self.value, dtype=wide)
        return self

    def cut(self, begin: int, end: int, key_mask: Tensor | None = None) -> "Piece":
        """Views of some of its keys, with another mask if one is given."""

        def some(tensor: Tensor | None, dim: int) -> Tensor | None:
            return None if tensor is None else tensor.narrow(dim, begin, end - begin)

        before = self.valid_before
        if before is not None and self.key_mask is not None:
            before = before + self.key_mask[:, :begin].sum(1)
        return Piece(
            self.key[:, :, begin:end],
            self.value[:, :, begin:end],
            self.start + begin,
            some(self.key_mask if key_mask is None else key_mask, 1),
            before,
            some(self.segment_ids, 1),
            some(self.grad_key, 2),
            some(self.grad_value, 2),
        )


@dataclass
class Rows:
    """The queries of a walk and where they are in their sequence.

    Args:
        inputs: of one call of the operator, without keys, values and their masks, which each piece brings.
        options: of the same call.
        start: the place of the first query in the sequence.
        length: how many keys the sequence has.
        all_queries: how many queries the whole call has, for which dropout is drawn; by default as many as keys.
        segments: ``[B, Lq]`` int32: the document of each row, None without documents.
        starts: ``[B, Lq]`` int32: the place of the first key of that document.
        valid_keys: ``[B]`` integers: how many keys of the sequence are no padding. None: all.
    """

    inputs: Inputs
    options: Options
    start: int
    length: int
    all_queries: int | None = None
    segments: Tensor | None = None
    starts: Tensor | None = None
    valid_keys: Tensor | None = None

    def __post_init__(self) -> None:
        query = self.inputs.query
        if not 0 <= self.start <= self.length - query.shape[2]:
            raise ValueError(
                f"start must leave room for {query.shape[2]} queries in a sequence of {self.length}, got {self.start}"
            )
        if self.inputs.key_lengths is not None:
            raise ValueError("key_lengths must be None for a sequence in pieces")
        if (self.segments is None) != (self.starts is None):
            raise ValueError("segments and starts must be given together")
        if self.inputs.row_bound is None and self.options.score_bound is None:
            raise ValueError("score_bound must be given: a piece does not know the keys of the others")
        if self.all_queries is None:
            self.all_queries = self.length
        if self.segments is not None and self.starts is not None:
            self.segments, self.starts = self.segments.int().contiguous(), self.starts.int().contiguous()
        if self.valid_keys is not None:
            self.valid_keys = self.valid_keys.long().contiguous()

    def place(self, piece: Piece) -> reference.Place:
        """Where the rows and the keys of the piece are."""
        assert self.all_queries is not None
        first, starts = self.start - (self.length - self.all_queries), self.starts
        if starts is not None and piece.waits_before is not None:
            starts = starts.where(starts >= piece.waits_before, -1).int()  # a document with keys to come goes on
        return reference.Place(
            self.segments, starts, self.valid_keys, first, self.all_queries, piece.start, self.length
        )

    def of(self, piece: Piece) -> Inputs:
        """The inputs of a call with the keys of one piece."""
        return self.inputs._replace(
            key=piece.key, value=piece.value, key_mask=piece.key_mask, segment_ids=piece.segment_ids
        )


class PiecesInOrder:
    """Joins pieces so that each ends where sums do: what lies between waits for the next piece.

    Args:
        span: how many keys are summed at a time.
        counts_padding: whether padding is among these.
    """

    def __init__(self, span: int, counts_padding: bool = False) -> None:
        self.span, self.counts_padding = span, counts_padding
        self.low: int | None = None
        """All keys from here on have been handed over."""
        self._waiting: list[Piece] = []

    def next_call(self, piece: Piece) -> tuple[Piece | None, list[Piece]]:
        """What to walk now that this piece is there too: one piece, and the pieces that it was joined from."""
        if self.low is not None and piece.start + len(piece) != self.low:
            raise ValueError(
                f"pieces must come from near to far without gaps: one that ends at {self.low} was expected, "
                f"got one that ends at {piece.start + len(piece)}"
            )
        self.low = piece.start
        parts = [piece, *self._waiting]
        whole = _join(parts)
        if whole.start == 0:
            self._waiting = []
            return whole, parts
        count = len(whole)
        if whole.key_mask is None or self.counts_padding:
            begins = min(-whole.start % self.span, count)
            least = most = begins
            boundary = now = later = None
        else:
            before = whole.start if whole.valid_before is None else whole.valid_before[:, None]
            wanted = -torch.as_tensor(before, device=whole.key.device) % self.span
            met = whole.key_mask.cumsum(1)
            boundary = ((met < wanted).sum(1, keepdim=True) + 1).clamp(max=count).where(wanted > 0, 0)
            least, most = int(boundary.min()), int(boundary.max())
            place = torch.arange(count, device=whole.key.device)
            now, later = whole.key_mask & (place >= boundary), whole.key_mask & (place < boundary)
        self._waiting = _cut_parts(parts, 0, most, later)
        if least == count:
            return None, []
        call = whole.cut(least, count, now)
        if boundary is not None and most > least:
            call.waits_before = whole.start + boundary
        return call, _cut_parts(parts, least, count, now)


def _join(parts: list[Piece]) -> Piece:
    if len(parts) == 1:
        return parts[0]

    def joined(name: str, dim: int) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], dim)

    masks = None
    if any(part.key_mask is not None for part in parts):
        masks = torch.cat(
            [
                torch.ones(part.key.shape[0], len(part), dtype=torch.bool, device=part.key.device)
                if part.key_mask is None
                else part.key_mask
                for part in parts
            ],
            1,
        )
    segments = None if parts[0].segment_ids is None else joined("segment_ids", 1)
    first = parts[0]
    return Piece(joined("key", 2), joined("value", 2), first.start, masks, first.valid_before, segments)


def _cut_parts(parts: list[Piece], begin: int, end: int, key_mask: Tensor | None) -> list[Piece]:
    """The same keys of the pieces that lie one after another."""
    found, at = [], 0
    for part in parts:
        low, high = max(begin - at, 0), min(end - at, len(part))
        if low < high:
            mask = None if key_mask is None else key_mask[:, at : at + len(part)]
            found.append(part.cut(low, high, mask))
        at += len(part)
    return found


def _chosen(impl: str, inputs: Inputs, options: Options) -> str:
    chosen = choose(impl, inputs, options)
    reason = triton.refusal_of_pieces(inputs, options) if chosen == "triton" else None
    if reason is not None and impl == "auto":
        return "reference"
    if reason is not None:
        raise ValueError(f"impl 'triton' {reason}")
    return chosen


class Walk:
    """Attention of rows over pieces of keys, from near to far, until they are done.

    With the native kernel and on a GPU the result has the bits of one call of the operator, wherever the sequence is
    cut; with the reference it is the same but for rounding. Every row is done when the piece at place 0 has been
    visited.

    Args:
        rows: the queries.
        impl: "auto", "cpu", "triton" (without dropout) or "reference".
        training: whether a :class:`BackwardWalk` follows.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 300, 8).unbind(0)
        >>> inputs = Inputs(q, k, v, -torch.rand(1, 2, 300), *[None] * 5)
        >>> walk = Walk(Rows(inputs, Options(0.25, 0.0, 0.0, 0.0, 1e-7, 30.0), start=0, length=300))
        >>> for start, end in ((200, 300), (0, 200)):
        ...     walk.visit(Piece(k[:, :, start:end], v[:, :, start:end], start))
        >>> walk.result().out.shape
        torch.Size([1, 2, 300, 8])
    """

    def __init__(self, rows: Rows, *, impl: str = "auto", training: bool = False) -> None:
        self.rows, self.training = rows, training
        self.impl = _chosen(impl, rows.inputs, rows.options)
        self.done = rows.inputs.query.shape[2] == 0
        """Whether no row needs another key."""
        query, value = rows.inputs.query, rows.inputs.value
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (*query.shape[:3], value.shape[3])
        self._pieces = _pieces_in_order(self.impl, rows.inputs)
        if self.impl == "triton":
            self._on_device = triton.forward_rows(rows, training)
            return
        self._out = query.new_zeros(shape)
        self._row_state = query.new_zeros(*query.shape[:3], 2, dtype=wide)
        keeps_residual = training and self.impl == "cpu" and query.dtype in cpu.RESIDUAL
        self._residual = query.new_zeros(shape if keeps_residual else (0,), dtype=torch.bfloat16)
        if self.impl == "cpu":
            self._state = query.new_zeros(*query.shape[:3], 6 + 2 * value.shape[3], dtype=wide)
            self._state[..., 2] = -torch.inf
        else:
            refuse_positive_gates(rows.inputs.log_gate)
            self._reference = reference.RowSums.at_start(rows.inputs)

    def visit(self, piece: Piece) -> None:
        """Go on with the keys of a piece, which ends where the one before began."""
        if self.done:
            return
        call, _ = self._pieces.next_call(piece)
        if call is None:
            return
        if self.impl == "triton":
            self._on_device.visit(call)
            self.done = not bool(self._on_device.going.any())
            return
        inputs, options = self.rows.of(call), self.rows.options
        place = self.rows.place(call)
        if self.impl == "reference":
            self._reference = reference.forward_piece(inputs, options, self._reference, place)
            self.done = bool(self._reference.done.all())
            return
        results = (self._state, self._out, self._row_state, self._residual)
        try:
            cpu.piece_operators().forward(*results, *place, *inputs, *options)
        except RuntimeError as error:
            raise cpu.as_python_error(error) from None
        self.done = bool((self._state[..., 0] != 0).all())

    @property
    def unfinished(self) -> Tensor:
        """``[B, Hq, Lq]``: the rows that need more keys."""
        if self.impl == "triton":
            return self._on_device.going
        return ~self._reference.done if self.impl == "reference" else self._state[..., 0] == 0

    def result(self) -> Result:
        if not self.done:
            count = int(self.unfinished.sum())
            raise ValueError(f"every row must be done, got {count} rows that need keys before {self._low}")
        if self.impl == "triton":
            return self._on_device.result()
        if self.impl == "reference":
            return reference.end_of_pieces(self.rows.inputs, self._reference)
        return Result(self._out, self._row_state, self._residual if self._residual.dim() == 4 else None)

    @property
    def _low(self) -> int:
        return self.rows.length if self._pieces.low is None else self._pieces.low


@dataclass
class RowGradients:
    """What a backward walk finds for rows, in the dtype of each."""

    query: Tensor
    log_gate: Tensor
    row_threshold: Tensor | None


class BackwardWalk:
    """Gradients over the same pieces in the same order.

    Args:
        rows: those of the :class:`Walk`.
        result: what it returned.
        grad_out: the gradient of its output.
        center: :func:`value_center` of the whole sequence.
        impl: the one that walked forward.
    """

    def __init__(self, rows: Rows, result: Result, grad_out: Tensor, center: Tensor, *, impl: str = "auto") -> None:
        self.rows, self.saved, self.grad_out, self.center = rows, result, grad_out, center
        self.impl = _chosen(impl, rows.inputs, rows.options)
        query, log_gate, threshold = rows.inputs.query, rows.inputs.log_gate, rows.inputs.row_threshold
        self.done = query.shape[2] == 0
        self._pieces = _pieces_in_order(self.impl, rows.inputs)
        if self.impl == "triton":
            self._on_device = triton.backward_rows(rows, result, grad_out)
            return
        wide = torch.promote_types(query.dtype, torch.float32)
        passes = threshold is not None and rows.options.straight_through > 0.0
        self._grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        self._grad_gate = torch.zeros_like(log_gate, dtype=wide, memory_format=torch.contiguous_format)
        self._grad_threshold = torch.zeros_like(self._grad_gate) if passes else None
        if self.impl == "cpu":
            self._state = query.new_zeros(*query.shape[:3], 14 + 2 * query.shape[3], dtype=wide)
        else:
            self._reference = reference.RowGradientSums.at_start(rows.inputs, result, grad_out)

    def visit(self, piece: Piece) -> None:
        """Go on with a piece. Gradients of its keys and values are added to it in this call and the next."""
        if piece.grad_key is None:
            piece.with_gradients()
        if self.done:
            return
        call, parts = self._pieces.next_call(piece)
        if call is None:
            return
        inputs, options = self.rows.of(call), self.rows.options
        place = self.rows.place(call)
        if self.impl == "triton":
            grad_key, grad_value = self._on_device.visit(call)
            self.done = not bool(self._on_device.going.any())
        elif self.impl == "reference":
            self._reference, grad_key, grad_value = reference.backward_piece(inputs, options, self._reference, place)
            self.done = bool(self._reference.done.all())
        else:
            saved = self.saved
            residual = saved.out.new_empty(0, dtype=torch.bfloat16) if saved.residual is None else saved.residual
            rows = (self._state, self._grad_query, self._grad_gate, self._grad_threshold)
            grad_key, grad_value = cpu.piece_operators().backward(
                *rows, self.center, self.grad_out, saved.out, saved.row_state, residual, *place, *inputs, *options
            )
            self.done = bool((self._state[..., 0] != 0).all())
        at = 0
        for part in parts:
            assert part.grad_key is not None
            assert part.grad_value is not None
            part.grad_key += grad_key[:, :, at : at + len(part)]
            part.grad_value += grad_value[:, :, at : at + len(part)]
            at += len(part)

    @property
    def unfinished(self) -> Tensor:
        """``[B, Hq, Lq]``: the rows that need more keys."""
        if self.impl == "triton":
            return self._on_device.going
        return ~self._reference.done if self.impl == "reference" else self._state[..., 0] == 0

    def result(self) -> RowGradients:
        if not self.done:
            raise ValueError("every row must be done: pieces are missing")
        inputs = self.rows.inputs
        threshold: Tensor | None
        if self.impl == "triton":
            query, gate, threshold = self._on_device.gradients
        elif self.impl == "reference":
            query, gate, threshold = self._reference.result(self.rows.options)
        else:
            query, gate, threshold = self._grad_query, self._grad_gate, self._grad_threshold
        if threshold is not None and inputs.row_threshold is not None and self.rows.options.straight_through > 0.0:
            threshold = threshold.to(inputs.row_threshold.dtype)
        else:
            threshold = None
        return RowGradients(query.to(inputs.query.dtype), gate.to(inputs.log_gate.dtype), threshold)


def value_range(value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each component among the values that are finite and no padding, ``[B, Hkv, Dv]`` in
    float32, infinite where there are none: what :func:`value_center` needs of each piece of a sequence."""
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    usable = wide.isfinite().all(-1, keepdim=True)
    if key_mask is not None:
        usable = usable & key_mask[:, None, :, None]
    if value.shape[2] == 0:
        none = wide.new_full((*value.shape[:2], value.shape[3]), math.inf)
        return none, -none
    return wide.masked_fill(~usable, math.inf).amin(2), wide.masked_fill(~usable, -math.inf).amax(2)


def value_center(ranges: list[tuple[Tensor, Tensor]], dropout: float = 0.0) -> Tensor:
    """``[B, Hkv, Dv]``: what all values of a sequence have in common, of each component whose values have one sign the
    one nearest to 0. Backward takes it away from them, because it cancels, but not its rounding.

    Args:
        ranges: :func:`value_range` of all pieces.
        dropout: with which nothing cancels.
    """
    least = torch.stack([low for low, _ in ranges]).amin(0)
    greatest = torch.stack([high for _, high in ranges]).amax(0)
    none = (least > greatest) | (dropout > 0.0)
    return (least.clamp(min=0.0) + greatest.clamp(max=0.0)).masked_fill(none, 0.0)


def _pieces_in_order(impl: str, inputs: Inputs) -> PiecesInOrder:
    if impl == "cpu":
        return PiecesInOrder(cpu.piece_operators().span(inputs.query))
    return PiecesInOrder(triton.span(inputs) if impl == "triton" else 1, counts_padding=impl == "triton")

"""The walk in pieces on a GPU: what a row has so far stays on the device, and each piece is one more call.

Sums run over the blocks of keys over which they run in one call, so every row has its bits, wherever the sequence is
cut. Keys and values get their gradients row after row, in an order that packing changes: with fewer rows or keys than
it takes, they have the bits of one call as well. Each visit waits for the device once, to see whether a row is left.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from tra.ops.threshold_relative.call import Result, refuse_positive_gates
from tra.ops.threshold_relative.dropout import WORD, mix
from tra.ops.threshold_relative.triton import RESIDUAL, kernels, launch, prepare, tiles

if TYPE_CHECKING:
    from tra.ops.threshold_relative.pieces import Piece, Rows

LOWEST = torch.finfo(torch.float32).min
IN_FRONT = 5
"""Numbers of a row in backward before the gradient of its query."""


class ForwardRows:
    """Rows that go on from piece to piece."""

    def __init__(self, rows: "Rows", training: bool) -> None:
        self.rows = rows
        inputs = rows.inputs
        refuse_positive_gates(inputs.log_gate)
        query, value = inputs.query, inputs.value
        self.out = query.new_zeros(*query.shape[:3], value.shape[3])
        self.row_state = query.new_zeros(*query.shape[:3], 2, dtype=torch.float32)
        self.residual = self.out.new_zeros(self.out.shape, dtype=torch.bfloat16)
        self.keeps_residual = training and query.dtype in RESIDUAL
        # [B, Hq, Lq, ...]: the largest logit, the sum of weights, the count, the next block, and the weighted sum.
        self.part = query.new_zeros(*query.shape[:3], 4 + tiles.padded(value.shape[3]), dtype=torch.float32)
        self.part[..., 0] = LOWEST
        self.lap = 0

    @property
    def going(self) -> Tensor:
        """[B, Hq, Lq]: whether a row needs more keys."""
        return self.row_state[..., 1] == self.lap

    def visit(self, piece: "Piece") -> None:
        rows, options = self.rows, self.rows.options
        if not reaches(rows, piece):
            return
        if self.lap == 0 and piece.start + len(piece) < rows.start + rows.inputs.query.shape[2]:
            raise ValueError(
                f"the nearest piece must hold the keys of all rows, up to {rows.start + rows.inputs.query.shape[2]}, "
                f"got one that ends at {piece.start + len(piece)}"
            )
        with launch.guard(piece.key.device):
            call, held = prepare_piece(rows, piece)
            position = first_place(rows, piece) + torch.arange(call.queries, device=piece.key.device)
            self.part[..., 3] = (position // call.block).clamp(0, triton.cdiv(held, call.block) - 1)
            tile = call.choices("decode")[0]  # with a state and a mask, those of forward spill
            # Rows before the piece meet none of its keys, and kernels would take them for done.
            skipped = min(max(0, -first_place(rows, piece)), call.queries)
            self.row_state[:, :, :skipped, 1] = -1.0
            results: dict[str, Any] = {"out_ptr": self.out, "state_ptr": self.row_state}
            results["residual_ptr"] = self.residual if self.keeps_residual else None
            for distance in launch.rounds_of(call.rows, held, options):
                order = None
                if self.lap or skipped:
                    order = launch.pack(call, launch.rounds_needed(self.row_state, call), (self.lap,), tile.rows)
                for careful in (False, True):
                    call.launch(
                        kernels.forward,
                        (triton.cdiv(call.rows, tile.rows), call.units),
                        tile,
                        **results,
                        part_ptr=self.part,
                        left_ptr=None,
                        order_ptr=order,
                        order_stride=0 if order is None else order.stride(0),
                        dirty_ptr=call.dirty,
                        first_unit=0,
                        lap=self.lap,
                        near=triton.cdiv(distance + tile.rows, call.block),
                        parts=0,
                        CAREFUL=careful,
                        DECODES=False,
                        PACKS=True,
                        RESUMES=True,
                    )
                self.lap += 1
            self.row_state[:, :, :skipped, 1] = self.lap

    def result(self) -> Result:
        return Result(self.out, self.row_state, self.residual if self.keeps_residual else None)


class BackwardRows:
    """The same rows again, for gradients."""

    def __init__(self, rows: "Rows", result: Result, grad_out: Tensor) -> None:
        self.rows, self.saved, self.grad_out = rows, result, prepare.side_by_side(grad_out)
        query = rows.inputs.query
        self.grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        self.grad_gate = query.new_zeros(query.shape[:3], dtype=torch.float32)
        self.grad_threshold = torch.zeros_like(self.grad_gate)
        self.part = query.new_zeros(*query.shape[:3], IN_FRONT + tiles.padded(query.shape[3]), dtype=torch.float32)
        self.left = query.new_ones(query.shape[:3], dtype=torch.int32)

    @property
    def going(self) -> Tensor:
        return self.left != 0

    @property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries, gates and thresholds."""
        return self.grad_query, self.grad_gate, self.grad_threshold

    def visit(self, piece: "Piece") -> tuple[Tensor, Tensor]:
        """The gradients of its keys and values in float32."""
        grad_key, grad_value = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (piece.key, piece.value)
        )
        if not reaches(self.rows, piece):
            return grad_key, grad_value
        saved = {"out_ptr": self.saved.out, "residual_ptr": self.saved.residual, "state_ptr": self.saved.row_state}
        with launch.guard(piece.key.device):
            call, held = prepare_piece(self.rows, piece, do_ptr=self.grad_out, **saved)
            blocks, places = triton.cdiv(held, call.block), triton.cdiv(call.rows, launch.MOST_ROWS) * launch.MOST_ROWS
            numbers = 8 if call.common["LEARNS"] else 4
            together = max(1, launch.SCRATCH // (numbers * call.units * places))
            for begin in reversed(range(0, blocks, together)):
                end = min(begin + together, blocks)
                self._visit(call, piece, begin * call.block, min(end * call.block, held), grad_key, grad_value)
        return grad_key, grad_value

    def _visit(
        self, call: prepare.Call, piece: "Piece", begin: int, end: int, grad_key: Tensor, grad_value: Tensor
    ) -> None:
        """Some keys of the piece: as many as scratch memory holds counts for."""
        rows, device = self.rows, piece.key.device
        part = piece.cut(begin, end)
        call = at(call, rows, part)
        tile, key_tile = (call.choices(name)[0] for name in ("backward_query", "backward_key"))
        tile = tile._replace(rows=key_tile.rows)  # more of them spill, because they bring a state
        held, learns = end - begin, call.common["LEARNS"]
        order, places = None, triton.cdiv(call.rows, launch.MOST_ROWS) * launch.MOST_ROWS
        if len(launch.rounds_of(call.rows, rows.length, rows.options)) > 1:
            left = self.left.view(call.units, -1, call.queries).transpose(1, 2).flatten(1)
            order = launch.pack(call, left, (1,), launch.MOST_ROWS)
            places = order.shape[1]
        blocks, walks, row_blocks = triton.cdiv(held, call.block), places // tile.rows, places // key_tile.rows
        counts, ranges, visitors = (
            torch.empty(call.units * size, dtype=torch.int32, device=device)
            for size in (blocks * places, 2 * walks, blocks * (row_blocks + 1))
        )
        given = {
            "part_ptr": self.part,
            "left_ptr": self.left,
            "dq_ptr": self.grad_query,
            "dg_ptr": self.grad_gate,
            "dt_ptr": self.grad_threshold if learns else None,
            "counts_ptr": counts,
            "sums_ptr": torch.empty_like(counts, dtype=torch.float32) if learns else None,
            "range_ptr": ranges,
            "visitors_ptr": visitors,
            "order_ptr": order,
            "order_stride": 0 if order is None else order.stride(0),
            "places": places,
            "row_blocks": row_blocks,
            "walks": walks,
            "stretch": 1,
            "held": held,
            "dk_ptr": grad_key,
            "dv_ptr": grad_value,
            "first_held": begin,
            "all_held": grad_key.shape[2],
            "WALKED": tile.rows,
        }
        for careful in (False, True):
            call.launch(kernels.resume_query, (walks, call.units), tile, **given, CAREFUL=careful)
        call.launch(kernels.list_visitors, (blocks, call.units), None, **given, M=key_tile.rows, SIZE=launch.LISTED)
        for careful in (False, True):
            call.launch(kernels.piece_key, (blocks, call.units), key_tile, **given, CAREFUL=careful)


def prepare_piece(rows: "Rows", piece: "Piece", **backward: Any) -> tuple[prepare.Call, int]:
    """A call of the kernels with the keys of the piece that any row may see, and how many these are."""
    held = min(len(piece), rows.start + rows.inputs.query.shape[2] - piece.start)
    if held < len(piece):
        piece = piece.cut(0, held)
    inputs = rows.inputs._replace(key=piece.key, value=piece.value, key_mask=None, segment_ids=None)
    call = prepare.prepare(inputs, rows.options, look_at_values=True, **backward)
    return at(call, rows, piece), held


def at(call: prepare.Call, rows: "Rows", piece: "Piece") -> prepare.Call:
    """The same call with places that are counted from the piece's first key, up to the last row."""
    key, value, held = prepare.side_by_side(piece.key), prepare.side_by_side(piece.value), len(piece)
    keys = first_place(rows, piece) + call.queries
    batch, device = key.shape[0], key.device
    mask = torch.ones(batch, keys, dtype=torch.uint8, device=device)
    if piece.key_mask is not None:
        mask[:, :held] = piece.key_mask
    # Where the walk of a row may end. What is before the piece counts as just before it.
    first = torch.full((batch,), -min(piece.start, 1), dtype=torch.int32, device=device)
    if piece.key_mask is not None:
        own = torch.where(piece.key_mask.any(1), piece.key_mask.int().argmax(1), keys)
        earlier = piece.start > 0 if piece.valid_before is None else piece.valid_before > 0
        first = torch.where(torch.as_tensor(earlier, device=device), -1, own).int()
    segments, slots = None, 0
    if rows.segments is not None and rows.starts is not None and piece.segment_ids is not None:
        segments = torch.zeros(batch, keys, dtype=torch.int32, device=device)
        segments[:, :held] = piece.segment_ids
        last = min(call.queries, keys)
        segments[:, keys - last :] = rows.segments[:, call.queries - last :]
        slots = prepare.slots_for(call.queries)
        slot = 1 + (mix(rows.segments.long() & WORD) & (slots - 1))
        begins = (rows.starts - piece.start).clamp(min=-1)
        none = torch.full((batch, slots), keys, dtype=torch.int32, device=device)
        first = torch.cat([first[:, None], none], 1).scatter_reduce(1, slot, begins, "amin")
    common = {
        **call.common,
        "k_ptr": key,
        "v_ptr": value,
        **prepare.strides("k", key),
        **prepare.strides("v", value),
        "keys": keys,
        "mask_ptr": mask,
        "segment_ptr": segments,
        "first_ptr": first,
        "slots": slots,
        "decay_left_out": prepare.decay_left_out(rows.options, rows.length),
        "HAS_MASK": True,
        "HAS_SEGMENTS": segments is not None,
    }
    return call._replace(common=common, keys=keys)


def reaches(rows: "Rows", piece: "Piece") -> bool:
    """Whether a row may see a key of the piece."""
    return piece.start < rows.start + rows.inputs.query.shape[2]


def first_place(rows: "Rows", piece: "Piece") -> int:
    """Of the rows, counted from the piece's first key."""
    return rows.start - piece.start

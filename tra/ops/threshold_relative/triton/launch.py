"""What the kernels are given: tensors as they want them, scratch memory, tiles. Nothing here waits for the device."""

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tra.ops.threshold_relative.call import Gradients, Inputs, Options, Result
from tra.ops.threshold_relative.reach import row_decay
from tra.ops.threshold_relative.reference import zero_gradients
from tra.ops.threshold_relative.triton import kernels, tiles, tuning

SCRATCH = 256 * 2**20
"""Bytes that the counts of backward may take at a time, and the rows that forward packs unless they are of one head."""
NEAR_KEYS, PART_KEYS = 512, 1024
"""Decoding walks the nearest keys first, and those beyond them in parts at once, if any row needs them."""
PACKED_FROM = 4096
"""Rows of a key head, and keys, from which on rows are packed: docs/gpu.md says why."""
FIRST_ROUND, GROWTH = 128, 4
"""Keys that the first round walks beyond the diagonal, and how much further each next one goes."""
MOST_ROWS = 128
"""A multiple of the rows of every tile."""
LOOKED_AT = 64
"""Rows that `look_at_rows` takes."""
LISTED = 256
"""Row blocks that `list_visitors` looks at together."""
PACKED = 1024
"""Rows that `pack_rows` takes."""


def forward(inputs: Inputs, options: Options, training: bool) -> Result:
    query, value = inputs.query, inputs.value
    rows = query.shape[:3]
    out = query.new_empty(*rows, value.shape[3])
    state = query.new_empty(*rows, 2, dtype=torch.float32)
    if out.numel() == 0:
        return Result(out, state.zero_(), None)
    call = _prepare(inputs, options)
    if call.rows <= call.choices("decode")[0].rows and call.keys > NEAR_KEYS:
        kind, walk = "decode", partial(_decode, call, out, state)
    else:
        dirty = _not_finite(inputs.key, call.units) | _not_finite(value, call.units)
        kind, walk = "forward", partial(_walk, call, out, state, dirty, _rounds(call, options))
    walk(tuning.choose(call.kind(kind), call.choices(kind), walk))
    return Result(out, state, None)


def _walk(call: "_Call", out: Tensor, state: Tensor, dirty: Tensor, rounds: list[int], tile: tiles.Tile) -> None:
    """Rounds over the keys, between which the rows that go on are packed."""
    packs = len(rounds) > 1
    size = call.rows * (call.widths[3] + 4)
    together = max(1, min(call.units, SCRATCH // (4 * size))) if packs else call.units
    part = out.new_empty(together * size, dtype=torch.float32) if packs else None
    constants = (tile.rows, call.block, *call.widths, *call.switches)
    for first_unit in range(0, call.units, together):
        units = min(together, call.units - first_unit)
        for lap, distance in enumerate(rounds):
            order = _in_order(call, tile.rows)
            if lap:
                classes = _rounds_needed(state, call)[first_unit : first_unit + units]
                order = _pack(call, classes, (lap,), tile.rows)
            # The first begins with the diagonal, and leaves heads with bad numbers to one that goes on to the end.
            near = triton.cdiv(distance + (0 if lap else tile.rows), call.block)
            for careful in (False,) if lap else (False, True):
                kernels.forward[(triton.cdiv(call.rows, tile.rows), units)](
                    *(call.query, call.key, call.value, call.gate, call.decay, out, state, part, None, order),
                    *(*call.masks, None if lap else dirty, *call.strides, call.decay_stride),
                    *(order.stride(0), first_unit, lap, near, 0, *call.sizes, *call.numbers, *constants),
                    *(careful, False, packs and not careful, lap > 0),
                    **call.launch_options(tile),
                )  # fmt: skip


def _decode(call: "_Call", out: Tensor, state: Tensor, tile: tiles.Tile) -> None:
    """A search for bad numbers would read the whole cache: every kernel is careful from the start."""
    near, blocks = NEAR_KEYS // call.block, PART_KEYS // call.block
    parts = 1 + triton.cdiv(triton.cdiv(call.keys, call.block) - near, blocks)
    part = out.new_empty(call.units * parts * call.rows * (call.widths[3] + 4), dtype=torch.float32)
    left = out.new_empty(call.units, dtype=torch.int32)
    tensors = (call.query, call.key, call.value, call.gate, call.decay)
    constants = (tile.rows, call.block, *call.widths, *call.switches)
    choice = call.launch_options(tile)
    kernels.forward[(1, call.units)](
        *(*tensors, out, state, part, left, _in_order(call, tile.rows), *call.masks, None),
        *(*call.strides, call.decay_stride, 0, 0, 0, near, parts, *call.sizes, *call.numbers, *constants),
        *(True, True, False, False),
        **choice,
    )
    for ends in (False, True):
        kernels.decode_part[(parts - 1, call.units)](
            *(*tensors, part, left, *call.masks, *call.strides, call.decay_stride, near, blocks),
            *(*call.sizes, *call.numbers[:3], *constants, ends),
            **choice,
        )
    kernels.join_parts[(call.units,)](
        *(*tensors, out, state, part, left, *call.masks[1:], *call.strides[:3], call.decay_stride, parts),
        *(*call.sizes, call.numbers[3], tile.rows, *call.widths),
        num_warps=tile.warps,
    )


def _rounds(call: "_Call", options: Options) -> list[int]:
    """How many keys each round of forward walks; one that walks them all where rows are not packed."""
    rounds = []
    if options.tolerance > 0.0 and min(call.rows, call.keys) >= PACKED_FROM:
        rounds = [FIRST_ROUND]
        while rounds[-1] * GROWTH < call.keys // 2:
            rounds.append(rounds[-1] * GROWTH)
    return [*rounds, call.keys]


def _rounds_needed(state: Tensor, call: "_Call") -> Tensor:
    """[units, rows]: in which round each row ended, or the next one; heads of a query side by side."""
    return state[..., 1].reshape(call.units, *call.sizes[1:3]).transpose(1, 2).reshape(call.units, call.rows)


def _in_order(call: "_Call", rows: int) -> Tensor:
    """[units, places]: all rows one after the other, in whole tiles."""
    places = triton.cdiv(call.rows, rows) * rows
    return torch.arange(places, dtype=torch.int32, device=call.query.device).expand(call.units, places)


def _pack(call: "_Call", classes: Tensor, wanted: tuple[int, ...], rows: int) -> Tensor:
    """[units, places]: rows of the classes that are wanted, each class in its own tiles of so many; -1 for none."""
    units, size = classes.shape
    places = (triton.cdiv(size, rows) + len(wanted) - 1) * rows
    order = torch.full((units, places), -1, dtype=torch.int32, device=classes.device)
    rank = torch.stack([classes == kind for kind in wanted], 1).cumsum(2, dtype=torch.int32)
    kernels.pack_rows[(triton.cdiv(size, PACKED), units)](
        rank, order, *call.sizes[1:3], places, len(wanted), rows, PACKED
    )
    return order


def backward(grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients:
    query, key, value = inputs[:3]
    out, state, _ = result
    if out.numel() == 0 or key.numel() == 0:
        return zero_gradients(inputs, options)
    call = _prepare(inputs, options)
    grad_out = _side_by_side(grad_out)
    dirty = _not_finite(key, call.units) | _not_finite(value, call.units)
    dirty |= _not_finite(query, call.units) | _not_finite(grad_out, call.units)
    rows = torch.empty(3 * call.gate.numel(), dtype=torch.float32, device=query.device)
    kernels.look_at_rows[(triton.cdiv(call.rows, LOOKED_AT), call.units)](
        *(call.gate, call.decay, out, grad_out, state, rows, *grad_out.stride()[:3], call.decay_stride),
        *(call.gate.numel(), *call.sizes[:3], LOOKED_AT, call.widths[1], call.widths[3]),
    )
    rounds = len(_rounds(call, options))
    order = _in_order(call, MOST_ROWS)
    if rounds > 1:
        order = _pack(call, _rounds_needed(state, call), tuple(range(rounds)), MOST_ROWS)
    walk = partial(_walk_again, call, grad_out, dirty, rows, order)
    choices = [*product(call.choices("backward_query"), call.choices("backward_key"))]
    gradients = walk(tuning.choose(call.kind("backward"), choices, walk))
    grad_query, grad_key, grad_value, grad_gate = (
        x.to(like.dtype) for x, like in zip(gradients, inputs[:4], strict=True)
    )
    return Gradients(grad_query, grad_key, grad_value, grad_gate, None)


def _walk_again(
    call: "_Call", grad_out: Tensor, dirty: Tensor, rows: Tensor, order: Tensor, chosen: tuple[tiles.Tile, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward, in pieces of as many rows and heads as scratch memory holds."""
    query, key, value = call.query, call.key, call.value
    grad_strides = grad_out.stride()[:3]
    tile, key_tile = chosen
    places = order.shape[1]
    key_blocks = triton.cdiv(call.keys, call.block)
    in_chunk = min(_chunk(key_blocks), triton.cdiv(places, MOST_ROWS) * MOST_ROWS)
    together = max(1, min(call.units, SCRATCH // (4 * in_chunk * key_blocks)))
    in_pieces = in_chunk < places

    grad_query, grad_gate = query.new_empty(query.shape), torch.empty_like(call.gate)
    # Pieces are summed in float32.
    grad_key, grad_value = (
        torch.empty(x.shape, dtype=torch.float32 if in_pieces else x.dtype, device=x.device) for x in (key, value)
    )
    row_blocks = in_chunk // key_tile.rows
    walks = in_chunk // tile.rows
    counts, ranges, visitors = (
        torch.empty(together * size, dtype=torch.int32, device=query.device)
        for size in (key_blocks * in_chunk, 2 * walks, key_blocks * (row_blocks + 1))
    )
    for first_unit in range(0, call.units, together):
        units = min(together, call.units - first_unit)
        for first_place in range(0, places, in_chunk):
            for careful in (False, True):
                kernels.backward_query[(walks, units)](
                    *(call.query, call.key, call.value, call.gate, grad_out, rows),
                    *(grad_query, grad_gate, ranges, counts),
                    *(order, *call.masks, dirty),
                    *call.strides, *grad_strides,
                    *(order.stride(0), first_unit, first_place, places, call.gate.numel()),
                    *call.sizes, *call.numbers, *(tile.rows, call.block), *call.widths, *call.switches, careful,
                    **call.launch_options(tile),
                )  # fmt: skip
            kernels.list_visitors[(key_blocks, units)](
                ranges, visitors, walks, row_blocks, key_blocks, tile.rows, key_tile.rows, LISTED
            )
            for careful in (False, True):
                kernels.backward_key[(key_blocks, units)](
                    *(call.query, call.key, call.value, call.gate, grad_out, rows),
                    *(grad_key, grad_value, visitors, counts),
                    *(order, *call.masks[:2], call.masks[3], dirty),
                    *call.strides, *grad_strides,
                    *(order.stride(0), first_unit, first_place, places, row_blocks, call.gate.numel()),
                    *call.sizes, *call.numbers, *(key_tile.rows, call.block), *call.widths, *call.switches, careful,
                    first_place > 0, **call.launch_options(key_tile),
                )  # fmt: skip
    return grad_query, grad_key, grad_value, grad_gate


def _chunk(key_blocks: int) -> int:
    """Rows of a key head that backward takes at a time, a multiple of every tile's.

    A function of the number of keys alone: pieces are summed one after the other, and a gradient must not depend on
    who shares the batch.
    """
    return max(1, SCRATCH // (4 * key_blocks * MOST_ROWS)) * MOST_ROWS


class _Call(NamedTuple):
    """A call as the kernels want it."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    decay: Tensor
    masks: tuple[Tensor | None, ...]
    """[B, Lk]: which keys are no padding; at which key each one's segment begins; and before which key a row that
    stands here sees none. And the seed of dropout."""
    strides: tuple[int, ...]
    decay_stride: int
    """0 if one number serves all rows."""
    units: int
    """Key heads of the batch."""
    rows: int
    """Of each of them."""
    keys: int
    block: int
    """Keys in a block."""
    sizes: tuple[int, ...]
    numbers: tuple[Any, ...]
    widths: tuple[int, ...]
    switches: tuple[bool, ...]

    def choices(self, kernel: str) -> tuple[tiles.Tile, ...]:
        return tiles.choices(kernel, tiles.family(self.query.device), self.query.dtype, *self.widths[:2])

    def launch_options(self, tile: tiles.Tile) -> dict[str, int]:
        return tiles.launch_options(tiles.family(self.query.device), tile)

    def kind(self, what: str) -> tuple[Any, ...]:
        """Calls that are taken to be fastest with the same tiles: lengths count in powers of two."""
        lengths = (self.rows.bit_length(), self.keys.bit_length())
        return what, self.query.device, self.query.dtype, self.widths[2:], lengths, self.switches


def _prepare(inputs: Inputs, options: Options) -> _Call:
    query, key, value = (_side_by_side(x) for x in inputs[:3])
    mask = None if inputs.key_mask is None else inputs.key_mask.contiguous().view(torch.uint8)
    segments, first = _first_visible(inputs)
    (batch, heads, queries, width), key_heads, keys = query.shape, key.shape[1], key.shape[2]
    value_width, group = value.shape[3], heads // key_heads
    decay = row_decay(inputs, options)
    return _Call(
        query,
        key,
        value,
        inputs.log_gate.float().contiguous(),
        decay.contiguous(),
        (mask, segments, first, inputs.dropout_seed),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        1 if decay.dim() else 0,
        batch * key_heads,
        group * queries,
        keys,
        tiles.keys_per_block(tiles.family(query.device), query.dtype, width, value_width),
        (key_heads, group, queries, keys),
        (options.scale, options.threshold, int(options.dropout * 2**32), 1.0 / (1.0 - options.dropout)),
        (width, value_width, tiles.padded(width), tiles.padded(value_width)),
        (mask is not None, segments is not None, options.dropout > 0.0),
    )


def _side_by_side(x: Tensor) -> Tensor:
    """Components next to each other; the other strides may be any."""
    return x if x.stride(3) == 1 else x.contiguous()


def _not_finite(x: Tensor, units: int) -> Tensor:
    """[units]: whether something in it is NaN or infinite."""
    largest = torch.linalg.vector_norm(x, float("inf"), dim=(2, 3))
    return ~largest.isfinite().reshape(units, -1).all(-1)


def _first_visible(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """[B, Lk], int32: the first key of the same segment; and of these the first that is no padding, beyond the last if
    all are."""
    mask, segments = inputs.key_mask, inputs.segment_ids
    if mask is None and segments is None:
        return None, None
    shape, device = inputs.key.shape[::2], inputs.key.device
    place = torch.arange(shape[1], dtype=torch.int32, device=device).expand(shape[0], shape[1])
    begins, first = None, torch.zeros_like(place)
    if segments is not None:
        # A stable sort brings segments together, each in its order; its first place is where the id changes.
        ids, order = segments.sort(dim=1, stable=True)
        changes = torch.ones_like(ids, dtype=torch.bool)
        changes[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = place.where(changes, 0).cummax(1).values
        begins = first = first.scatter(1, order, order.gather(1, starts.long()).int())
    if mask is not None:
        first = first.maximum(place.where(mask, shape[1]).amin(1, keepdim=True))
    return begins, first

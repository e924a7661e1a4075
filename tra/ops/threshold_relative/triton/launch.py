"""What the kernels are given: tensors as they want them, scratch memory, tiles. Nothing here waits for the device."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tra.ops.threshold_relative.call import Gradients, Inputs, Options
from tra.ops.threshold_relative.reach import row_decay
from tra.ops.threshold_relative.triton import kernels, tiles

SCRATCH = 256 * 2**20
"""Bytes that the counts of backward may take at a time."""
NEAR_KEYS, PART_KEYS = 512, 1024
"""Decoding walks the nearest keys first, and those beyond them in parts at once, if any row needs them."""
MOST_ROWS = 128
"""A multiple of the rows of every tile."""
LOOKED_AT = 64
"""Rows that `look_at_rows` takes."""
LISTED = 256
"""Row blocks that `list_visitors` looks at together."""


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    query, key, value = inputs[:3]
    rows = query.shape[:3]
    out = query.new_empty(*rows, value.shape[3])
    state = query.new_empty(*rows, 2, dtype=torch.float32)
    if out.numel() == 0:
        return out, state.zero_()
    call = _prepare(inputs, options)
    tile = _tile("forward", inputs)
    near, blocks = NEAR_KEYS // call.block, PART_KEYS // call.block
    beyond = triton.cdiv(key.shape[2], call.block) - near
    decodes = call.rows <= tile.rows and beyond > 0
    parts, shape = 0, (triton.cdiv(call.rows, tile.rows), call.units)
    part = left = dirty = None
    if decodes:
        parts = 1 + triton.cdiv(beyond, blocks)
        part = query.new_empty(call.units * parts * call.rows * (call.widths[3] + 3), dtype=torch.float32)
        left = query.new_empty(call.units, dtype=torch.int32)
    else:
        dirty = _not_finite(key, call.units) | _not_finite(value, call.units)
    masks = (call.mask, call.segments, call.first, inputs.dropout_seed)
    constants = (tile.rows, call.block, *call.widths, *call.switches)
    choice = {"num_warps": tile.warps, "num_stages": tile.stages}
    # A search for bad numbers would read the whole cache: decoding is careful from the start.
    for careful in (True,) if decodes else (False, True):
        kernels.forward[shape](
            *(call.query, call.key, call.value, call.gate, call.decay, out, state, part, left, *masks, dirty),
            *(*call.strides, call.decay_stride, near, parts, *call.sizes, *call.numbers, *constants, careful, decodes),
            **choice,
        )
    if decodes:
        kernels.decode_part[(parts - 1, call.units)](
            *(call.query, call.key, call.value, call.gate, call.decay, part, left, *masks),
            *(*call.strides, call.decay_stride, near, blocks, *call.sizes, *call.numbers[:3], *constants),
            **choice,
        )
        kernels.join_parts[(call.units,)](
            *(call.query, call.key, call.value, call.gate, call.decay, out, state, part, left, *masks),
            *(*call.strides, call.decay_stride, near, blocks, parts, *call.sizes, *call.numbers, *constants),
            **choice,
        )
    return out, state


def backward(grad_out: Tensor, inputs: Inputs, out: Tensor, state: Tensor, options: Options) -> Gradients:
    query, key, value, log_gate = inputs[:4]
    if out.numel() == 0 or key.numel() == 0:
        return tuple(torch.zeros_like(x) for x in inputs[:4])  # type: ignore[return-value]
    call = _prepare(inputs, options)
    grad_out = _side_by_side(grad_out)
    grad_strides = grad_out.stride()[:3]
    dirty = _not_finite(key, call.units) | _not_finite(value, call.units)
    dirty |= _not_finite(query, call.units) | _not_finite(grad_out, call.units)
    tile, key_tile = _tile("backward_query", inputs), _tile("backward_key", inputs)

    key_blocks = triton.cdiv(key.shape[2], call.block)
    in_chunk = min(_chunk(key_blocks), triton.cdiv(call.rows, MOST_ROWS) * MOST_ROWS)
    together = max(1, min(call.units, SCRATCH // (4 * in_chunk * key_blocks)))
    in_pieces = in_chunk < call.rows

    grad_query, grad_gate = query.new_empty(query.shape), torch.empty_like(call.gate)
    # Pieces are summed in float32.
    grad_key, grad_value = (
        torch.empty(x.shape, dtype=torch.float32 if in_pieces else x.dtype, device=x.device) for x in (key, value)
    )
    rows = torch.empty(3 * call.gate.numel(), dtype=torch.float32, device=query.device)
    kernels.look_at_rows[(triton.cdiv(call.rows, LOOKED_AT), call.units)](
        *(call.gate, call.decay, out, grad_out, state, rows, *grad_strides, call.decay_stride),
        *(call.gate.numel(), *call.sizes[:3], LOOKED_AT, call.widths[1], call.widths[3]),
    )
    row_blocks = in_chunk // key_tile.rows
    walks = in_chunk // tile.rows
    counts, ranges, visitors = (
        torch.empty(together * size, dtype=torch.int32, device=query.device)
        for size in (key_blocks * in_chunk, 2 * walks, key_blocks * (row_blocks + 1))
    )
    for first_unit in range(0, call.units, together):
        units = min(together, call.units - first_unit)
        for first_row in range(0, call.rows, in_chunk):
            for careful in (False, True):
                kernels.backward_query[(walks, units)](
                    *(call.query, call.key, call.value, call.gate, grad_out, rows),
                    *(grad_query, grad_gate, ranges, counts),
                    *(call.mask, call.segments, call.first, inputs.dropout_seed, dirty),
                    *call.strides, *grad_strides, *(first_unit, first_row, call.gate.numel()),
                    *call.sizes, *call.numbers, *(tile.rows, call.block), *call.widths, *call.switches, careful,
                    num_warps=tile.warps, num_stages=tile.stages,
                )  # fmt: skip
            kernels.list_visitors[(key_blocks, units)](
                ranges, visitors, walks, row_blocks, key_blocks, tile.rows, key_tile.rows, LISTED
            )
            for careful in (False, True):
                kernels.backward_key[(key_blocks, units)](
                    *(call.query, call.key, call.value, call.gate, grad_out, rows),
                    *(grad_key, grad_value, visitors, counts),
                    *(call.mask, call.segments, inputs.dropout_seed, dirty),
                    *call.strides, *grad_strides, *(first_unit, first_row, row_blocks, call.gate.numel()),
                    *call.sizes, *call.numbers, *(key_tile.rows, call.block), *call.widths, *call.switches, careful,
                    first_row > 0, num_warps=key_tile.warps, num_stages=key_tile.stages,
                )  # fmt: skip
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_gate.to(log_gate.dtype)


def _chunk(key_blocks: int) -> int:
    """Rows of a key head that backward takes at a time, a multiple of every tile's.

    A function of the number of keys alone: pieces are summed one after the other, and a gradient must not depend on
    who shares the batch.
    """
    return max(1, SCRATCH // (4 * key_blocks * MOST_ROWS)) * MOST_ROWS


def _tile(kernel: str, inputs: Inputs) -> tiles.Tile:
    query, value = inputs.query, inputs.value
    return tiles.tile(kernel, tiles.family(query.device), query.dtype, query.shape[3], value.shape[3])


class _Call(NamedTuple):
    """A call as the kernels want it."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    decay: Tensor
    mask: Tensor | None
    segments: Tensor | None
    first: Tensor | None
    """[B, Lk]: before which key a row that stands here sees none."""
    strides: tuple[int, ...]
    decay_stride: int
    """0 if one number serves all rows."""
    units: int
    """Key heads of the batch."""
    rows: int
    """Of each of them."""
    block: int
    """Keys in a block."""
    sizes: tuple[int, ...]
    numbers: tuple[Any, ...]
    widths: tuple[int, ...]
    switches: tuple[bool, ...]


def _prepare(inputs: Inputs, options: Options) -> _Call:
    query, key, value = (_side_by_side(x) for x in inputs[:3])
    mask = None if inputs.key_mask is None else inputs.key_mask.contiguous().view(torch.uint8)
    segments = None if inputs.segment_ids is None else inputs.segment_ids.contiguous()
    (batch, heads, queries, width), key_heads, keys = query.shape, key.shape[1], key.shape[2]
    value_width, group = value.shape[3], heads // key_heads
    decay = row_decay(inputs, options)
    return _Call(
        query,
        key,
        value,
        inputs.log_gate.float().contiguous(),
        decay.contiguous(),
        mask,
        segments,
        _first_visible(inputs),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        1 if decay.dim() else 0,
        batch * key_heads,
        group * queries,
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


def _first_visible(inputs: Inputs) -> Tensor | None:
    """[B, Lk], int32: the first key that is no padding and of the same segment; beyond the last if all is padding."""
    mask, segments = inputs.key_mask, inputs.segment_ids
    if mask is None and segments is None:
        return None
    shape, device = inputs.key.shape[::2], inputs.key.device
    place = torch.arange(shape[1], device=device).expand(shape[0], shape[1])
    first = torch.zeros_like(place)
    if segments is not None:
        # A stable sort brings segments together, each in its order; its first place is where the id changes.
        ids, order = segments.sort(dim=1, stable=True)
        changes = torch.ones_like(ids, dtype=torch.bool)
        changes[:, 1:] = ids[:, 1:] != ids[:, :-1]
        begins = place.where(changes, 0).cummax(1).values
        first = first.scatter(1, order, order.gather(1, begins))
    if mask is not None:
        first = first.maximum(place.where(mask, shape[1]).amin(1, keepdim=True))
    return first.to(torch.int32)

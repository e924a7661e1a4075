"""Output and state of rows: in one walk, or in rounds between which the rows that go on are packed together."""

import triton
import triton.language as tl

from tra.ops.threshold_relative.triton.kernels.walk import (
    NUMBERS,
    finish_rows,
    goes_on,
    load_part,
    meet_rows,
    nothing_yet,
    rows_left,
    save_part,
    take_rows,
    walk_forward,
)


@triton.jit(do_not_specialize=NUMBERS)
def forward(
    q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, out_ptr, residual_ptr, state_ptr, part_ptr, left_ptr,
    order_ptr, mask_ptr, segment_ptr, first_ptr, seed_ptr, lengths_ptr, dirty_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    order_stride, first_unit, lap, near, parts, key_heads, group, queries, keys, slots,
    scale, threshold, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    LEARNS: tl.constexpr, DECODES: tl.constexpr, PACKS: tl.constexpr, RESUMES: tl.constexpr,
):  # fmt: skip
    """Output and state of M rows.

    One that decodes, M rows of a key head being all there are, walks `near` blocks only, and leaves behind how many
    rows need more than these. One that packs does so too, and leaves the rows that need more to another lap, to
    which they come together by an order: far keys are before all of them, so any may share a tile.
    """
    unit = tl.program_id(1) + first_unit
    if dirty_ptr is not None:  # noqa: SIM102
        if (tl.load(dirty_ptr + unit) != 0) != CAREFUL:
            return
    # The last rows have most to do: first, so that no long program is left over at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    places, rows = tl.num_programs(0) * M, group * queries
    if order_ptr is not None:
        order_ptr += tl.program_id(1).to(tl.int64) * order_stride
    row, present = take_rows(order_ptr, tile * M + tl.arange(0, M), places, rows)
    if tl.max(present.to(tl.int32), 0) == 0:
        return
    batch, length, position, q, gate, reach, limit, first_key, segment, low, high, k_ptr, v_ptr = meet_rows(
        unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, segment_ptr, first_ptr, seed_ptr,
        lengths_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, key_heads, group, queries, keys, slots,
        threshold, M, WIDTH, D, HAS_MASK, HAS_SEGMENTS, DROPOUT,
    )  # fmt: skip
    first = tl.min(first_key, 0) // N
    if not RESUMES:
        total, largest, weights, count = nothing_yet(M, E)
        block = tl.max(tl.where(present, position, 0), 0) // N
        until = first
        if DECODES or PACKS:
            until = tl.maximum(first, block + 1 - near)
    else:
        total, largest, weights, count, its_block = load_part(part_ptr, tl.program_id(1), rows, row, present, E)
        # The keys that a row met in earlier rounds it sees no more.
        position = tl.minimum(position, (its_block + 1) * N - 1)
        block = tl.max(tl.where(present, its_block, 0), 0)
        until = tl.maximum(first, tl.min(tl.where(present, its_block, block), 0) + 1 - near)
    total, largest, weights, count, block = walk_forward(
        total, largest, weights, count, block, until,
        q, gate, reach, limit, position, first_key, segment, low, high,
        k_ptr, v_ptr, mask_ptr, segment_ptr, k_row, v_row, batch, keys, length, scale, drop_below,
        N, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL, LEARNS,
    )  # fmt: skip
    row, present = take_rows(order_ptr, tile * M + tl.arange(0, M), places, rows)
    finished = present
    if DECODES:
        tl.store(left_ptr + unit, rows_left(count, reach, first_key, block, N))
        save_part(part_ptr, unit * parts, rows, row, present, total, largest, weights, count, block, E)
    if PACKS:
        going = goes_on(count, reach, first_key, block, N)
        finished = present & (going == 0)
        save_part(part_ptr, tl.program_id(1), rows, row, going, total, largest, weights, count, block, E)
        its_round_ptr = state_ptr + 2 * (unit.to(tl.int64) * rows + row) + 1
        tl.store(its_round_ptr, tl.zeros_like(weights) + (lap + 1), mask=going)
    finish_rows(
        out_ptr, residual_ptr, state_ptr, unit, row, finished, reach, total, largest, weights, lap, group, queries,
        drop_scale, VALUE_WIDTH, E,
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def pack_rows(
    rank_ptr, order_ptr, group, queries, places, CLASSES: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """From the number of rows of each class up to each slot, which rows stand at which place: those of a class together
    and in their order, each class from a multiple of M on.

    Slots have the heads of a query side by side, so that a tile spans few queries.
    """
    unit, rows = tl.program_id(1).to(tl.int64), group * queries
    slot = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = slot < rows
    rank_ptr += unit * CLASSES * rows
    order_ptr += unit * places
    for _ in tl.static_range(CLASSES):
        rank = tl.load(rank_ptr + slot, mask=there, other=0)
        before = tl.load(rank_ptr + slot - 1, mask=there & (slot > 0), other=0)
        tl.store(order_ptr + rank - 1, slot % group * queries + slot // group, mask=there & (rank > before))
        order_ptr += tl.cdiv(tl.load(rank_ptr + rows - 1), M) * M
        rank_ptr += rows

"""Gradients over a piece of the keys: of queries, going on from what earlier pieces left behind, and of the keys and
values of the piece. Forward needs no kernel of its own: `forward` goes on from a row's state as it is.

Places are counted from the first key of the piece, so rows may be far behind its last key, and before its first.
"""

import triton
import triton.language as tl

from tra.ops.threshold_relative.triton.kernels.backward import (
    add_rows,
    reach_left_out,
    store_gradients,
    walk_backward,
)
from tra.ops.threshold_relative.triton.kernels.walk import (
    NUMBERS,
    goes_on,
    is_finite,
    later_keys,
    load_keys,
    load_rows,
    meet_rows,
    store_rows,
    take_rows,
)

NUMBERS_OF_PIECES = [*NUMBERS, "held"]


@triton.jit(do_not_specialize=NUMBERS_OF_PIECES)
def resume_query(
    q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, do_ptr, size_ptr, delta_ptr, dq_ptr, dg_ptr, dt_ptr,
    part_ptr, left_ptr, range_ptr, counts_ptr, sums_ptr, order_ptr, mask_ptr, segment_ptr, first_ptr, seed_ptr,
    lengths_ptr, dirty_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, order_stride, places, stretch, held, key_heads, group, queries, keys,
    slots, scale, threshold, temperature, decay_left_out, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    """As `backward_query`, over the `held` keys of a piece. A row that needs no more gets its gradients; every row
    leaves behind its sums, and whether it goes on."""
    unit = tl.program_id(1)
    if (tl.load(dirty_ptr + unit) != 0) != CAREFUL:
        return
    rows = group * queries
    before = unit.to(tl.int64) * rows
    chunk = tl.num_programs(0) * M
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)
    range_ptr += 2 * (unit * tl.num_programs(0) + row_block)
    if order_ptr is not None:
        order_ptr += unit.to(tl.int64) * order_stride
    row, present = take_rows(order_ptr, row_block * M + tl.arange(0, M), places, rows)
    nearest = tl.max(tl.where(present, row % queries + keys - queries, -1), 0)
    if nearest < 0:  # all rows are before the piece, or there are none
        tl.store(range_ptr, -1)
        tl.store(range_ptr + 1, -1)
        return
    batch, length, position, q, gate, reach, limit, first_key, segment, low, high, k_ptr, v_ptr = meet_rows(
        unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, segment_ptr, first_ptr, seed_ptr,
        lengths_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, key_heads, group, queries, keys, slots,
        threshold, M, WIDTH, D, HAS_MASK, HAS_SEGMENTS, DROPOUT,
    )  # fmt: skip
    position = tl.minimum(position, held - 1)
    do_ptr += batch * do_batch + (unit % key_heads).to(tl.int64) * group * do_head
    do = load_rows(do_ptr, row // queries, do_head, row % queries, do_row, present, VALUE_WIDTH, E)
    size = tl.load(size_ptr + before + row, mask=present, other=0.0)
    delta = tl.load(delta_ptr + before + row, mask=present, other=0.0)
    if CAREFUL:
        do = tl.where(is_finite(do), do, 0.0)
    far = reach
    if LEARNS:
        far = reach_left_out(reach, gate, decay_left_out)
    its_part_ptr = part_ptr + (before + row) * (D + 5)
    count = tl.load(its_part_ptr, mask=present, other=0.0)
    rest = tl.load(its_part_ptr + 1, mask=present, other=0.0)
    mean = tl.load(its_part_ptr + 2, mask=present, other=0.0)
    dg = tl.load(its_part_ptr + 3, mask=present, other=0.0)
    dt = tl.load(its_part_ptr + 4, mask=present, other=0.0)
    column = tl.arange(0, D)
    dq = tl.load(its_part_ptr[:, None] + 5 + column[None, :], mask=present[:, None], other=0.0)

    stretches = tl.cdiv(tl.cdiv(held, N), stretch)
    entry = unit.to(tl.int64) * stretches * chunk + row_block * M + tl.arange(0, M)
    counts_ptr += entry
    if LEARNS:
        sums_ptr += entry
    until = tl.min(first_key, 0) // N
    block = tl.max(tl.where(present, position, 0), 0) // N
    tl.store(range_ptr, block)
    dq, dg, dt, rest, mean, count, block = walk_backward(
        dq, dg, dt, rest, mean, count, block, until,
        q, do, gate, reach, far, limit, size, delta, position, first_key, segment, low, high,
        counts_ptr, sums_ptr, k_ptr, v_ptr, mask_ptr, segment_ptr, k_row, v_row, chunk, stretch, batch, keys,
        length, scale, temperature, drop_below, drop_scale,
        N, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL, LEARNS,
    )  # fmt: skip
    tl.store(range_ptr + 1, block)
    row, present = take_rows(order_ptr, row_block * M + tl.arange(0, M), places, rows)
    going = goes_on(count, far, first_key, block, N) | (position < 0)  # rows before the piece are yet to begin
    tl.store(left_ptr + before + row, going.to(tl.int32), mask=present)
    # Threads may have read here what others write now.
    tl.debug_barrier()
    its_part_ptr = part_ptr + (before + row) * (D + 5)
    tl.store(its_part_ptr, count, mask=present)
    tl.store(its_part_ptr + 1, rest, mask=present)
    tl.store(its_part_ptr + 2, mean, mask=present)
    tl.store(its_part_ptr + 3, dg, mask=present)
    tl.store(its_part_ptr + 4, dt, mask=present)
    tl.store(its_part_ptr[:, None] + 5 + column[None, :], dq, mask=present[:, None])
    ends = present & (going == 0)
    good = delta == delta
    store_rows(dq_ptr + before * WIDTH, row, ends, tl.where(good[:, None], dq * scale, float("nan")), WIDTH, D)
    dg -= rest * mean
    tl.store(dg_ptr + before + row, tl.where(good, dg, float("nan")), mask=ends)
    if LEARNS:
        tl.store(dt_ptr + before + row, tl.where(good, dt, float("nan")), mask=ends)


@triton.jit(do_not_specialize=NUMBERS_OF_PIECES)
def piece_key(
    q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, do_ptr, size_ptr, delta_ptr, dk_ptr, dv_ptr,
    visitors_ptr, counts_ptr, sums_ptr, order_ptr, mask_ptr, segment_ptr, seed_ptr, dirty_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, order_stride, places, row_blocks, held, first_held, all_held,
    key_heads, group, queries, keys, scale, threshold, temperature, decay_left_out, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    """As `backward_key`, of a block of the `held` keys, whose gradients begin at `first_held` of `all_held`."""
    unit = tl.program_id(1)
    if (tl.load(dirty_ptr + unit) != 0) != CAREFUL:
        return
    entry = unit.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    visitors_ptr += entry * (row_blocks + 1)
    visitors = tl.load(visitors_ptr)
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    before = unit.to(tl.int64) * group * queries
    k_ptr += batch * k_batch + key_head * k_head
    v_ptr += batch * v_batch + key_head * v_head
    q_ptr += batch * q_batch + key_head * group * q_head
    do_ptr += batch * do_batch + key_head * group * do_head
    gate_ptr += before
    reach_ptr += before
    size_ptr += before
    delta_ptr += before
    if threshold_ptr is not None:
        threshold_ptr += before
    counts_ptr += entry * row_blocks * M
    if LEARNS:
        sums_ptr += entry * row_blocks * M
    if order_ptr is not None:
        order_ptr += unit.to(tl.int64) * order_stride
    later = later_keys(N)
    block = tl.program_id(0)
    key = block * N + tl.arange(0, N)
    there = key < held
    k = load_keys(k_ptr, block * N, k_row, held, N, WIDTH, D)
    v = load_keys(v_ptr, block * N, v_row, held, N, VALUE_WIDTH, E)
    readable = there & (tl.min(is_finite(k).to(tl.int32), 1) != 0)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, E], tl.float32)
    for number in tl.range(0, visitors):
        in_chunk = tl.load(visitors_ptr + 1 + number) * M + tl.arange(0, M)
        dk, dv = add_rows(
            dk, dv, k, v, readable, key, in_chunk,
            q_ptr, gate_ptr, reach_ptr, threshold_ptr, do_ptr, size_ptr, delta_ptr,
            counts_ptr, sums_ptr, order_ptr, seed_ptr, mask_ptr, segment_ptr, later,
            batch, before, 0, places, q_head, q_row, do_head, do_row, group, queries, keys,
            keys, scale, threshold, temperature, decay_left_out, drop_below, drop_scale,
            WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL, LEARNS, False,
        )  # fmt: skip
    first = unit.to(tl.int64) * all_held + first_held
    store_gradients(
        dk_ptr + first * WIDTH, dv_ptr + first * VALUE_WIDTH, dk, dv, key, there, scale,
        WIDTH, VALUE_WIDTH, D, E, False,
    )  # fmt: skip

"""Few rows over many keys: stretches of the cache walked at once, as far as a row needs them, and joined."""

import triton
import triton.language as tl

from tra.ops.threshold_relative.triton.kernels.walk import (
    LOWEST,
    NUMBERS,
    finish_rows,
    load_part,
    meet_rows,
    nothing_yet,
    rows_left,
    save_part,
    walk_forward,
)


@triton.jit(do_not_specialize=NUMBERS)
def decode_part(
    q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, part_ptr, left_ptr,
    mask_ptr, segment_ptr, first_ptr, seed_ptr, lengths_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, passed, blocks, parts,
    key_heads, group, queries, keys, slots, scale, threshold, drop_below,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """A stretch of the keys beyond those already `passed`, as if nothing had been counted before it."""
    unit, part = tl.program_id(1), tl.program_id(0)
    if tl.load(left_ptr + unit) == 0:
        return
    row = tl.arange(0, M)
    present = row < group * queries
    batch, length, position, q, gate, reach, limit, first_key, segment, low, high, k_ptr, v_ptr = meet_rows(
        unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, segment_ptr, first_ptr, seed_ptr,
        lengths_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, key_heads, group, queries, keys, slots,
        threshold, M, WIDTH, D, HAS_MASK, HAS_SEGMENTS, DROPOUT,
    )  # fmt: skip
    total, largest, weights, count = nothing_yet(M, E)
    block = tl.cdiv(length, N) - 1 - passed - part * blocks
    until = tl.maximum(tl.min(first_key, 0) // N, block + 1 - blocks)
    total, largest, weights, count, block = walk_forward(
        total, largest, weights, count, block, until,
        q, gate, reach, limit, position, first_key, segment, low, high,
        k_ptr, v_ptr, mask_ptr, segment_ptr, k_row, v_row, batch, keys, length, scale, drop_below,
        N, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, True, LEARNS,
    )  # fmt: skip
    save_part(
        part_ptr, unit * parts + part + 1, group * queries, row, present, total, largest, weights, count, block, E
    )


@triton.jit(do_not_specialize=NUMBERS)
def join_parts(
    q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, out_ptr, residual_ptr, state_ptr, part_ptr,
    left_ptr, next_left_ptr, mask_ptr, segment_ptr, first_ptr, seed_ptr, lengths_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, passed, blocks, parts, walks,
    key_heads, group, queries, keys, slots, scale, threshold, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """What a row has so far and the parts walked in this round as one: a part's weigh exp(g * what was counted before
    it) times as much. A part in which a row ends is walked again for it, to stop at the right key."""
    unit, rows = tl.program_id(0), group * queries
    left = tl.load(left_ptr + unit)
    if left == 0:
        tl.store(next_left_ptr + unit, 0)
        return
    row = tl.arange(0, M)
    present = row < rows
    batch, length, position, q, gate, reach, limit, first_key, segment, low, high, k_ptr, v_ptr = meet_rows(
        unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, segment_ptr, first_ptr, seed_ptr,
        lengths_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, key_heads, group, queries, keys, slots,
        threshold, M, WIDTH, D, HAS_MASK, HAS_SEGMENTS, DROPOUT,
    )  # fmt: skip
    total, largest, weights, count, _block = load_part(part_ptr, unit * parts, rows, row, present, E)
    last = tl.cdiv(length, N) - 1 - passed
    for part in tl.range(0, walks):
        its_total, its_largest, its_weights, its_count, _block = load_part(
            part_ptr, unit * parts + part + 1, rows, row, present, E
        )
        ends = present & (count < reach) & (count + its_count > reach)
        there = (count < reach) & (ends == 0)
        counted = there & (its_count > 0.0)
        if LEARNS:  # a part without kept keys may hold the largest score of a row that has none
            counted = there
        its_largest = tl.where(counted, its_largest + gate * count, LOWEST)
        larger = tl.maximum(largest, its_largest)
        shrink, grow = tl.exp(largest - larger), tl.exp(its_largest - larger)
        total = total * shrink[:, None] + tl.where(counted[:, None], its_total * grow[:, None], 0.0)
        weights = weights * shrink + tl.where(counted, its_weights * grow, 0.0)
        largest = larger
        if tl.max(ends.to(tl.int32), 0) != 0:
            block = last - part * blocks
            until = tl.maximum(tl.min(first_key, 0) // N, block + 1 - blocks)
            total, largest, weights, _count, block = walk_forward(
                total, largest, weights, count, block, until,
                q, gate, tl.where(ends, reach, 0.0), limit, position, first_key, segment, low, high,
                k_ptr, v_ptr, mask_ptr, segment_ptr, k_row, v_row, batch, keys, length, scale, drop_below,
                N, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, True, False,
            )  # fmt: skip
        count += tl.where(there | ends, its_count, 0.0)
    after = tl.maximum(last - walks * blocks, -1)
    tl.store(next_left_ptr + unit, rows_left(count, reach, first_key, after, N))
    save_part(part_ptr, unit * parts, rows, row, present, total, largest, weights, count, after, E)
    finish_rows(
        out_ptr, residual_ptr, state_ptr, unit, row, present, reach, total, largest, weights, 0, group, queries,
        drop_scale, VALUE_WIDTH, E,
    )  # fmt: skip

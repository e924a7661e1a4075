"""What is known of keys and rows before any walk: norms, whether all is finite, and where a row is done."""

import triton
import triton.language as tl

from tra.ops.threshold_relative import reach
from tra.ops.threshold_relative.triton.kernels.walk import (
    INFINITY,
    NUMBERS,
    is_finite,
    load_keys,
    load_length,
    load_rows,
    slot_of,
)

SLACK = tl.constexpr(reach.SLACK)


@triton.jit(do_not_specialize=NUMBERS)
def look_at_keys(
    k_ptr, v_ptr, mask_ptr, norm_ptr, peak_ptr, lengths_ptr, dirty_ptr,
    k_batch, k_head, k_row, v_batch, v_head, v_row, key_heads, keys,
    N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Mark heads whose keys or values are not all finite. Of each key the largest norm in its block up to it, and of
    each block the largest, of keys that can be kept, if they are wanted."""
    unit, block = tl.program_id(1), tl.program_id(0)
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    length = load_length(lengths_ptr, batch, keys)
    k = load_keys(k_ptr + batch * k_batch + key_head * k_head, block * N, k_row, length, N, WIDTH, D)
    good = tl.min(is_finite(k).to(tl.int32), 1)
    if dirty_ptr is not None:
        v = load_keys(v_ptr + batch * v_batch + key_head * v_head, block * N, v_row, length, N, VALUE_WIDTH, E)
        clean = tl.minimum(tl.min(good, 0), tl.min(tl.min(is_finite(v).to(tl.int32), 1), 0))
        tl.store(dirty_ptr + unit, 1, mask=clean == 0)  # programs that race here write the same
    if norm_ptr is not None:
        place = tl.arange(0, N)
        key = block * N + place
        if mask_ptr is not None:
            good = good * (tl.load(mask_ptr + batch * keys + key, mask=key < keys, other=0) != 0)
        wide = k.to(tl.float64)
        norm = tl.where(good != 0, tl.sqrt(tl.sum(wide * wide, 1)).to(tl.float32), 0.0)
        running = tl.max(tl.where(place[None, :] <= place[:, None], norm[None, :], 0.0), 1)
        tl.store(norm_ptr + unit.to(tl.int64) * keys + key, running, mask=key < keys)
        tl.store(peak_ptr + unit.to(tl.int64) * tl.num_programs(0) + block, tl.max(norm, 0))


@triton.jit(do_not_specialize=NUMBERS)
def look_at_masks(
    mask_ptr, segment_ptr, first_ptr, keys, slots,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The first key of a sequence that is no padding and, in slots, the first of each segment. Where segments share a
    slot it is the first of all of them, which is before theirs: rows may walk further than they need, and end there."""
    batch, key = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    first_ptr += batch * (slots + 1)
    if HAS_MASK:
        there = tl.load(mask_ptr + batch * keys + key, mask=key < keys, other=0) != 0
        tl.atomic_min(first_ptr, tl.min(tl.where(there, key, keys), 0))
    if HAS_SEGMENTS:
        segment_ptr += batch * keys + key
        segment = tl.load(segment_ptr, mask=key < keys, other=0)
        before = tl.load(segment_ptr - 1, mask=(key > 0) & (key < keys), other=0)
        begins = (key < keys) & ((key == 0) | (segment != before))
        tl.atomic_min(first_ptr + 1 + slot_of(segment, slots), key, mask=begins)


@triton.jit
def load_number(ptr, batch, head, query, batch_stride, head_stride, row_stride, present):
    """One number of each row, of a tensor [B, Hq, Lq] with any strides."""
    place = batch * batch_stride + head * head_stride + query.to(tl.int64) * row_stride
    return tl.load(ptr + place, mask=present, other=0.0)


@triton.jit
def row_reach(gate, odds):
    """The count of kept keys at which a row is done: the last lines of reach.py, in double precision like it."""
    decay = (tl.maximum(odds, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(odds)))) * (1.0 + 1e-9)
    falls = gate < 0.0
    reach = tl.ceil(decay / tl.where(falls, -gate, 1.0).to(tl.float64)).to(tl.float32)
    return tl.where(falls, reach, INFINITY)


@triton.jit(do_not_specialize=NUMBERS)
def look_at_rows(
    q_ptr, its_gate_ptr, its_threshold_ptr, its_bound_ptr, norm_ptr, peak_ptr, gate_ptr, reach_ptr, threshold_ptr,
    do_ptr, out_ptr, residual_ptr, state_ptr, size_ptr, delta_ptr, lengths_ptr, dirty_ptr,
    q_batch, q_head, q_row, gate_batch, gate_head, gate_row, threshold_batch, threshold_head, threshold_row,
    bound_batch, bound_head, bound_row, do_batch, do_head, do_row, key_heads, group, queries, keys,
    scale, threshold, bound, bound_rest, odds, odds_rest,
    M: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Gate, threshold and reach of each row in float32; the reach is -1 for a row that is not finite.

    For backward also the logarithm of its sum of weights and delta = do . out. A row that is not finite, or whose
    gradient is not, reaches no key and is marked by a delta of NaN. Numbers in double precision come in two parts.
    """
    unit = tl.program_id(1)
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    present = row < group * queries
    place = unit.to(tl.int64) * group * queries + row
    head, query = key_head * group + row // queries, row % queries
    q = load_rows(q_ptr + batch * q_batch, head, q_head, query, q_row, present, WIDTH, D)
    gate = load_number(its_gate_ptr, batch, head, query, gate_batch, gate_head, gate_row, present).to(tl.float32)
    finite = tl.min(is_finite(q).to(tl.int32), 1) != 0
    good = finite & is_finite(gate)
    limit = tl.full([M], threshold, tl.float32)
    if its_threshold_ptr is not None:
        limit = load_number(
            its_threshold_ptr, batch, head, query, threshold_batch, threshold_head, threshold_row, present
        ).to(tl.float32)
        good = good & is_finite(limit)
        tl.store(threshold_ptr + place, tl.where(good, limit, 0.0), mask=present)

    if its_bound_ptr is not None:
        largest = load_number(its_bound_ptr, batch, head, query, bound_batch, bound_head, bound_row, present)
        largest = tl.where(is_finite(largest), largest.to(tl.float64) * SLACK, INFINITY)
    elif norm_ptr is not None:
        position = query + load_length(lengths_ptr, batch, keys) - queries
        there = present & (position >= 0)
        norm = tl.load(norm_ptr + unit.to(tl.int64) * keys + position, mask=there, other=0.0)
        # The largest norm of all blocks before a row's own.
        peak_ptr += unit.to(tl.int64) * tl.cdiv(keys, SIZE) - 1
        earlier = tl.load(peak_ptr + position // SIZE, mask=present & (position >= SIZE), other=0.0)
        wide = q.to(tl.float64)
        length = tl.sqrt(tl.sum(wide * wide, 1)) * scale * SLACK
        # A key's norm may overflow, but a query of zeros scores 0 with every key.
        largest = tl.where(length > 0.0, length * tl.maximum(norm, earlier).to(tl.float64), 0.0)
    else:
        largest = tl.zeros([M], tl.float64) + bound + bound_rest
    spread = tl.maximum(largest - tl.maximum(-largest, limit.to(tl.float64)), 0.0)
    reach = row_reach(gate, spread + odds + odds_rest)

    if do_ptr is not None:
        do = load_rows(do_ptr + batch * do_batch, head, do_head, query, do_row, present, VALUE_WIDTH, E).to(tl.float32)
        out = load_rows(out_ptr, place, VALUE_WIDTH, row, 0, present, VALUE_WIDTH, E).to(tl.float32)
        if residual_ptr is not None:
            out += load_rows(residual_ptr, place, VALUE_WIDTH, row, 0, present, VALUE_WIDTH, E).to(tl.float32)
        size = tl.load(state_ptr + 2 * place, mask=present, other=0.0)
        delta = tl.sum(do * out, 1)
        its_gradient = tl.min(is_finite(do).to(tl.int32), 1) != 0
        good = good & is_finite(size) & is_finite(delta) & its_gradient
        tl.store(size_ptr + place, tl.where(good, size, 0.0), mask=present)
        tl.store(delta_ptr + place, tl.where(good, delta, float("nan")), mask=present)
        clean = tl.min((finite & its_gradient).to(tl.int32), 0)
        tl.store(dirty_ptr + unit, 1, mask=clean == 0)
    tl.store(gate_ptr + place, tl.where(good, gate, 0.0), mask=present)
    tl.store(reach_ptr + place, tl.where(good, reach, -1.0), mask=present)

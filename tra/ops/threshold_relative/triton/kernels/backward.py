"""Gradients in two kernels without atomics: of queries by rows, which leave behind what each row had counted on
entering each stretch of keys, and of keys and values by stretches, which start from these counts."""

import triton
import triton.language as tl

from tra.ops.threshold_relative.triton.kernels.walk import (
    INFINITY,
    NUMBERS,
    dropout_words,
    is_finite,
    later_keys,
    load_keys,
    load_length,
    load_rows,
    load_threshold,
    meet_rows,
    product,
    rows_left,
    score_keys,
    score_tile,
    steps_until,
    store_rows,
    survives,
    take_rows,
    visibility,
)


@triton.jit
def nearer_sum(x, later, EXACT: tl.constexpr):
    """[M, N]: the sum of x over the later keys of the block, as a product with ones.

    There is no fast product of float32, but a bfloat16 has its range: two hold 16 bits of x, three hold all.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    ones = later.to(tl.bfloat16)
    high = x.to(tl.bfloat16)
    total = product(high, ones, tl.zeros([M, N], tl.float32))
    rest = x - high.to(tl.float32)
    low = rest.to(tl.bfloat16)
    total = product(low, ones, total)
    if EXACT:
        total = product((rest - low.to(tl.float32)).to(tl.bfloat16), ones, total)
    return total


@triton.jit
def reach_left_out(reach, gate, decay):
    """The count up to which keys that are left out have gradients: there may be many of them, and rows go on until all
    together have little. docs/exactness.md. A negative reach marks a row that is not finite."""
    falls = gate < 0.0
    far = tl.where(falls, tl.ceil(decay / tl.where(falls, -gate, 1.0)), INFINITY)
    return tl.where(reach < 0.0, reach, tl.maximum(reach, far))


@triton.jit
def gradient_of_scores(
    dp, score, keep, distance, visible, gate, reach, far, threshold, size, delta, carried, later, temperature,
    LEARNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Weights, gradients of logits, and gradients of scores. These two differ by what passes the threshold: through
    whether a key is kept, and through the distance of all farther ones."""
    near = distance < reach[:, None]
    used = keep & near
    logit = score + gate[:, None] * distance - size[:, None]
    counts = used
    if LEARNS:
        counts = visible & (distance < far[:, None])
    weight = tl.where(counts, tl.exp(logit), 0.0)
    ds = tl.where(counts, weight * (dp - delta[:, None]), 0.0)
    through = ds
    if LEARNS:
        weight, through = tl.where(used, weight, 0.0), tl.where(used, ds, 0.0)
        # The gradients of a row's logits sum to 0: those of all keys from here on are minus those of the nearer ones.
        # Beyond the reach they sum to 0, but for the tolerance.
        farther = tl.where(near, -(carried[:, None] + nearer_sum(through, later, EXACT)), 0.0)
        odds = tl.exp(-tl.abs((score - threshold[:, None]) / temperature))
        slope = odds / ((1.0 + odds) * (1.0 + odds) * temperature)
        ds = tl.where(counts, slope * (ds + gate[:, None] * farther), 0.0)
    return weight, through, ds


@triton.jit
def walk_backward(
    dq, dg, dt, rest, mean, count, block, until,
    q, do, gate, reach, far, threshold, size, delta, position, first_key, segment, low, high,
    counts_ptr, sums_ptr, k_ptr, v_ptr, mask_ptr, segment_ptr, k_stride, v_stride, counts_stride, stretch, batch, keys,
    length, scale, temperature, drop_below, drop_scale,
    N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    """The walk of `walk_forward` again, which leaves behind what each row had counted, and the sum of the gradients of
    its logits, before each stretch of key blocks."""
    M: tl.constexpr = q.shape[0]
    later = later_keys(N)
    left = rows_left(count, far, first_key, block, N)
    walked = block * 0
    while (block >= until) & (left > 0):
        steps = steps_until(block, until, walked)
        for step in tl.range(0, steps):
            key, k, visible, score, keep, distance = score_keys(
                block - step, q, count, position, segment, later,
                k_ptr, mask_ptr, segment_ptr, k_stride, batch, keys, length, scale, threshold,
                N, WIDTH, D, HAS_MASK, HAS_SEGMENTS, CAREFUL,
            )  # fmt: skip
            if CAREFUL:
                k = tl.where(is_finite(k), k, 0.0)
            enters = ((block - step) % stretch == stretch - 1) | (walked + step == 0)
            place = ((block - step) // stretch).to(tl.int64) * counts_stride
            tl.store(counts_ptr + place, count.to(tl.int32), mask=enters)
            if LEARNS:
                tl.store(sums_ptr + place, rest, mask=enters)
            v = load_keys(v_ptr, (block - step) * N, v_stride, length, N, VALUE_WIDTH, E)
            if CAREFUL:
                v = tl.where(is_finite(v), v, 0.0)
            dp = product(do, tl.trans(v), tl.zeros([M, N], tl.float32))
            if DROPOUT:
                dp = tl.where(survives(low, high, key, drop_below), dp * drop_scale, 0.0)
            weight, through, ds = gradient_of_scores(
                dp, score, keep, distance, visible, gate, reach, far, threshold, size, delta, rest, later, temperature,
                LEARNS, q.dtype == tl.float32,
            )  # fmt: skip
            if LEARNS:
                dt -= tl.sum(ds, 1)
                ds += through
            count += tl.sum(keep.to(tl.float32), 1)
            rest += tl.sum(through, 1)
            mean += tl.sum(weight * distance, 1)
            dg += tl.sum(through * distance, 1)
            dq = product(ds.to(k.dtype), k, dq)
        block -= steps
        walked += steps
        left = rows_left(count, far, first_key, block, N)
    return dq, dg, dt, rest, mean, count, block


@triton.jit(do_not_specialize=NUMBERS)
def backward_query(
    q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, do_ptr, size_ptr, delta_ptr, dq_ptr, dg_ptr, dt_ptr,
    range_ptr, counts_ptr, sums_ptr, order_ptr, mask_ptr, segment_ptr, first_ptr, seed_ptr, lengths_ptr, dirty_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, order_stride, first_unit, first_place, places, stretch, key_heads, group, queries, keys,
    slots, scale, threshold, temperature, decay_left_out, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    """Gradients of M queries, gates and thresholds; for `backward_key`, which key blocks were visited, and the counts
    with which their stretches were entered."""
    unit = tl.program_id(1) + first_unit
    if (tl.load(dirty_ptr + unit) != 0) != CAREFUL:
        return
    before = unit.to(tl.int64) * group * queries
    chunk = tl.num_programs(0) * M
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)
    if order_ptr is not None:
        order_ptr += unit.to(tl.int64) * order_stride
    row, present = take_rows(order_ptr, first_place + row_block * M + tl.arange(0, M), places, group * queries)
    batch, length, position, q, gate, reach, limit, first_key, segment, low, high, k_ptr, v_ptr = meet_rows(
        unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, segment_ptr, first_ptr, seed_ptr,
        lengths_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, key_heads, group, queries, keys, slots,
        threshold, M, WIDTH, D, HAS_MASK, HAS_SEGMENTS, DROPOUT,
    )  # fmt: skip
    do_ptr += batch * do_batch + (unit % key_heads).to(tl.int64) * group * do_head
    do = load_rows(do_ptr, row // queries, do_head, row % queries, do_row, present, VALUE_WIDTH, E)
    size = tl.load(size_ptr + before + row, mask=present, other=0.0)
    delta = tl.load(delta_ptr + before + row, mask=present, other=0.0)
    if CAREFUL:
        do = tl.where(is_finite(do), do, 0.0)
    far = reach
    if LEARNS:
        far = reach_left_out(reach, gate, decay_left_out)

    stretches = tl.cdiv(tl.cdiv(keys, N), stretch)
    entry = tl.program_id(1).to(tl.int64) * stretches * chunk + row_block * M + tl.arange(0, M)
    counts_ptr += entry
    if LEARNS:
        sums_ptr += entry
    dq, dg, dt = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    rest, mean, count = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    until = tl.min(first_key, 0) // N
    block = tl.max(tl.where(present, position, 0), 0) // N
    range_ptr += 2 * (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + row_block)
    tl.store(range_ptr, block)
    dq, dg, dt, rest, mean, count, block = walk_backward(
        dq, dg, dt, rest, mean, count, block, until,
        q, do, gate, reach, far, limit, size, delta, position, first_key, segment, low, high,
        counts_ptr, sums_ptr, k_ptr, v_ptr, mask_ptr, segment_ptr, k_row, v_row, chunk, stretch, batch, keys,
        length, scale, temperature, drop_below, drop_scale,
        N, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL, LEARNS,
    )  # fmt: skip
    tl.store(range_ptr + 1, block)
    row, present = take_rows(order_ptr, first_place + row_block * M + tl.arange(0, M), places, group * queries)
    good = delta == delta
    store_rows(dq_ptr + before * WIDTH, row, present, tl.where(good[:, None], dq * scale, float("nan")), WIDTH, D)
    # The gradients of a row's logits sum to 0. What rounding leaves of them is not to be multiplied by distances.
    dg -= rest * mean
    tl.store(dg_ptr + before + row, tl.where(good, dg, float("nan")), mask=present)
    if LEARNS:
        tl.store(dt_ptr + before + row, tl.where(good, dt, float("nan")), mask=present)


@triton.jit(do_not_specialize=NUMBERS)
def list_visitors(
    range_ptr, visitors_ptr, walks, row_blocks, stretch,
    WALKED: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """For each stretch of key blocks how many blocks of M rows visited it, and which, in their order; WALKED rows went
    together."""
    tl.static_assert(WALKED % M == 0, "rows of which only some have a count here")
    unit, place = tl.program_id(1).to(tl.int64), tl.program_id(0)
    range_ptr += 2 * unit * walks
    visitors_ptr += (unit * tl.num_programs(0) + place) * (row_blocks + 1)
    found = 0
    for start in tl.range(0, row_blocks, SIZE):
        row_block = start + tl.arange(0, SIZE)
        there = row_block < row_blocks
        pointers = range_ptr + 2 * (row_block // (WALKED // M))
        came = tl.load(pointers, mask=there, other=-1) >= place * stretch
        came = came & (tl.load(pointers + 1, mask=there, other=0) < (place + 1) * stretch - 1)
        number = tl.cumsum(came.to(tl.int32), 0)
        tl.store(visitors_ptr + found + number, row_block, mask=came)
        found += tl.sum(came.to(tl.int32), 0)
    tl.store(visitors_ptr, found)


@triton.jit
def add_rows(
    dk, dv, k, v, readable, key, in_chunk, q_ptr, gate_ptr, reach_ptr, threshold_ptr, do_ptr, size_ptr, delta_ptr,
    counts_ptr, sums_ptr, order_ptr, seed_ptr, mask_ptr, segment_ptr, later, batch, before, first_place, places,
    q_head, q_row, do_head, do_row, group, queries, keys, length,
    scale, threshold, temperature, decay_left_out, drop_below, drop_scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    LEARNS: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """What a block of rows that visited the keys adds to their gradients."""
    M: tl.constexpr = in_chunk.shape[0]
    N: tl.constexpr = k.shape[0]
    row, present = take_rows(order_ptr, first_place + in_chunk, places, group * queries)
    position = row % queries + length - queries
    q = load_rows(q_ptr, row // queries, q_head, row % queries, q_row, present, WIDTH, D)
    do = load_rows(do_ptr, row // queries, do_head, row % queries, do_row, present, VALUE_WIDTH, E)
    gate = tl.load(gate_ptr + row, mask=present, other=0.0)
    size = tl.load(size_ptr + row, mask=present, other=0.0)
    delta = tl.load(delta_ptr + row, mask=present, other=0.0)
    reach = tl.load(reach_ptr + row, mask=present, other=0.0)
    limit = load_threshold(threshold_ptr, row, present, threshold, M)
    count = tl.load(counts_ptr + in_chunk).to(tl.float32)
    carried = count
    if LEARNS:
        carried = tl.load(sums_ptr + in_chunk)
    segment = tl.zeros([M], tl.int32)
    if HAS_SEGMENTS:
        segment = tl.load(segment_ptr + batch * keys + position, mask=present & (position >= 0), other=0)
    low, high = row.to(tl.uint32), row.to(tl.uint32)
    if DROPOUT:
        low, high = dropout_words(seed_ptr, before + row)
    visible = readable[None, :] & visibility(
        key, position, keys, segment, mask_ptr, segment_ptr, batch, HAS_MASK, HAS_SEGMENTS
    )
    score, keep, distance = score_tile(q, k, count, visible, later, scale, limit)
    if CAREFUL:
        q = tl.where(is_finite(q), q, 0.0)
        do = tl.where(is_finite(do), do, 0.0)
        v = tl.where(is_finite(v), v, 0.0)
    dp = product(do, tl.trans(v), tl.zeros([M, N], tl.float32))
    factor = 1.0
    if DROPOUT:
        factor = tl.where(survives(low, high, key, drop_below), drop_scale, 0.0)
        dp *= factor
    far = reach
    if LEARNS:
        far = reach_left_out(reach, gate, decay_left_out)
    weight, through, ds = gradient_of_scores(
        dp, score, keep, distance, visible, gate, reach, far, limit, size, delta, carried, later, temperature,
        LEARNS, q.dtype == tl.float32,
    )  # fmt: skip
    dv = product(tl.trans((weight * factor).to(do.dtype)), do, dv)
    if LEARNS:
        ds += through
    dk = product(tl.trans(ds.to(q.dtype)), q, dk)
    if SEVERAL:  # for the next block of the stretch
        tl.store(counts_ptr + in_chunk, (count + tl.sum(keep.to(tl.float32), 1)).to(tl.int32))
        if LEARNS:
            tl.store(sums_ptr + in_chunk, carried + tl.sum(through, 1))
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS)
def backward_key(
    q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, do_ptr, size_ptr, delta_ptr, dk_ptr, dv_ptr,
    visitors_ptr, range_ptr, counts_ptr, sums_ptr, order_ptr, mask_ptr, segment_ptr, seed_ptr, lengths_ptr, dirty_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, order_stride, first_unit, first_place, places, row_blocks, walks, stretch,
    key_heads, group, queries, keys, scale, threshold, temperature, decay_left_out, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    LEARNS: tl.constexpr, ADDS: tl.constexpr, SEVERAL: tl.constexpr, WALKED: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of a stretch, block after block from the near end, added to those of earlier
    rows if there were any."""
    unit = tl.program_id(1) + first_unit
    if (tl.load(dirty_ptr + unit) != 0) != CAREFUL:
        return
    entry = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    visitors_ptr += entry * (row_blocks + 1)
    visitors = tl.load(visitors_ptr)
    if ADDS:  # noqa: SIM102
        if visitors == 0:
            return
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    before = unit.to(tl.int64) * group * queries
    length = load_length(lengths_ptr, batch, keys)
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
    range_ptr += 2 * tl.program_id(1).to(tl.int64) * walks
    dk_ptr += unit.to(tl.int64) * keys * WIDTH
    dv_ptr += unit.to(tl.int64) * keys * VALUE_WIDTH
    if order_ptr is not None:
        order_ptr += unit.to(tl.int64) * order_stride
    later = later_keys(N)
    first = tl.program_id(0) * stretch
    block = tl.minimum(first + stretch, tl.cdiv(keys, N)) - 1
    while block >= first:
        key = block * N + tl.arange(0, N)
        there = key < keys
        k = load_keys(k_ptr, block * N, k_row, length, N, WIDTH, D)
        v = load_keys(v_ptr, block * N, v_row, length, N, VALUE_WIDTH, E)
        readable = there & (tl.min(is_finite(k).to(tl.int32), 1) != 0)
        dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, E], tl.float32)
        came = visitors * 0
        for number in tl.range(0, visitors):
            row_block = tl.load(visitors_ptr + 1 + number)
            in_chunk = row_block * M + tl.arange(0, M)
            if SEVERAL:
                its_range_ptr = range_ptr + 2 * (row_block // (WALKED // M))
                if (block <= tl.load(its_range_ptr)) & (block > tl.load(its_range_ptr + 1)):
                    came += 1
                    dk, dv = add_rows(
                        dk, dv, k, v, readable, key, in_chunk,
                        q_ptr, gate_ptr, reach_ptr, threshold_ptr, do_ptr, size_ptr, delta_ptr,
                        counts_ptr, sums_ptr, order_ptr, seed_ptr, mask_ptr, segment_ptr, later,
                        batch, before, first_place, places, q_head, q_row, do_head, do_row, group, queries, keys,
                        length, scale, threshold, temperature, decay_left_out, drop_below, drop_scale,
                        WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL, LEARNS, SEVERAL,
                    )  # fmt: skip
            else:
                dk, dv = add_rows(
                    dk, dv, k, v, readable, key, in_chunk,
                    q_ptr, gate_ptr, reach_ptr, threshold_ptr, do_ptr, size_ptr, delta_ptr,
                    counts_ptr, sums_ptr, order_ptr, seed_ptr, mask_ptr, segment_ptr, later,
                    batch, before, first_place, places, q_head, q_row, do_head, do_row, group, queries, keys,
                    length, scale, threshold, temperature, decay_left_out, drop_below, drop_scale,
                    WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL, LEARNS, SEVERAL,
                )  # fmt: skip
        if not SEVERAL:
            came = visitors
        if ADDS:
            there = there & (came > 0)
        store_gradients(dk_ptr, dv_ptr, dk, dv, key, there, scale, WIDTH, VALUE_WIDTH, D, E, ADDS)
        if SEVERAL:  # counts that some threads wrote others read next
            tl.debug_barrier()
        block -= 1


@triton.jit
def store_gradients(
    dk_ptr, dv_ptr, dk, dv, key, there, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    dk *= scale
    if ADDS:
        dk += load_rows(dk_ptr, key, WIDTH, key, 0, there, WIDTH, D)
        dv += load_rows(dv_ptr, key, VALUE_WIDTH, key, 0, there, VALUE_WIDTH, E)
    store_rows(dk_ptr, key, there, dk, WIDTH, D)
    store_rows(dv_ptr, key, there, dv, VALUE_WIDTH, E)

"""The walk over keys as Triton kernels: forward, decoding, and backward in two. docs/gpu.md has a drawing.

A program works on rows of one key head: query heads that share it follow one another, so row r is query r % Lq of the
r // Lq-th of them. Key blocks begin at multiples of N, whatever the rows, so that a row's result does not depend on the
rows beside it: any may share a tile. Heads that hold NaN or infinity are left to a second launch that is CAREFUL.
Shapes: M rows and N keys of a tile, D and E the widths of keys and values, padded.
"""

import triton
import triton.language as tl

from tra.ops.threshold_relative import dropout

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
AT_ONCE = tl.constexpr(4)
"""Key blocks between two looks at whether rows are left: only an inner loop of known length is pipelined."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Below every logit, and finite: the difference of two infinities is NaN."""
INFINITY = tl.constexpr(float("inf"))
GOLDEN = tl.constexpr(dropout.GOLDEN)
FIRST_MULTIPLIER = tl.constexpr(dropout.FIRST_MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(dropout.SECOND_MULTIPLIER)


@triton.jit
def product(a, b, total):
    """total + a @ b in float32, never in tf32."""
    if INTERPRETED:  # bfloat16 would be multiplied as raw bits
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < INFINITY


@triton.jit
def mix(x):
    """As in dropout.py, on words of 32 bits."""
    x = (x ^ (x >> 16)) * FIRST_MULTIPLIER
    x = (x ^ (x >> 15)) * SECOND_MULTIPLIER
    return x ^ (x >> 16)


@triton.jit
def dropout_words(seed_ptr, row):
    """What a row contributes to the mask."""
    seed = tl.load(seed_ptr)
    low_seed, high_seed = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    row = row.to(tl.uint32)
    low = mix(mix(mix(low_seed) ^ high_seed) ^ row)
    high = mix(mix(mix(high_seed ^ GOLDEN) ^ low_seed) ^ row)
    return low, high


@triton.jit
def survives(low, high, key, drop_below):
    """Which weights of a tile dropout leaves."""
    x = (key.to(tl.uint32) * GOLDEN)[None, :] + low[:, None]
    x = (x ^ (x >> 16)) * FIRST_MULTIPLIER
    x = ((x ^ (x >> 15)) + high[:, None]) * SECOND_MULTIPLIER
    return (x ^ (x >> 16)) >= drop_below.to(tl.uint32)


@triton.jit
def take_rows(order_ptr, place, places, rows):
    """Rows at these places of an order, and which there are.

    Loaded again after a walk, and not kept in registers meanwhile.
    """
    row = tl.load(order_ptr + place, mask=place < places, other=-1)
    present = (row >= 0) & (row < rows)
    return tl.where(present, row, 0), present


@triton.jit
def load_rows(
    ptr, head, head_stride, row, row_stride, present, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of several heads, with zeros beyond their width and where not present."""
    column = tl.arange(0, BLOCK)
    place = head.to(tl.int64) * head_stride + row.to(tl.int64) * row_stride
    mask = present[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + place[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_keys(ptr, start, stride, keys, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A block of N keys or values, with zeros beyond their width and beyond the last."""
    row, column = tl.arange(0, N), tl.arange(0, BLOCK)
    pointers = ptr + start.to(tl.int64) * stride + (row[:, None] * stride + column[None, :])
    return tl.load(pointers, mask=(row < keys - start)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, place, present, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Into a contiguous tensor."""
    column = tl.arange(0, BLOCK)
    pointers = ptr + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=present[:, None] & (column < WIDTH)[None, :])


@triton.jit
def row_reach(decay_ptr, decay_stride, gate, place, present):
    """The count of kept keys at which a row is done: the last line of reach.py, in double precision like it."""
    decay = tl.load(decay_ptr + place * decay_stride, mask=present, other=0.0)
    reach = tl.ceil(decay / -gate.to(tl.float64)).to(tl.float32)
    return tl.where(gate < 0.0, reach, INFINITY)


@triton.jit
def visibility(
    key, position, keys, segment, mask_ptr, segment_ptr, batch, HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr
):  # fmt: skip
    """[M, N]: what each row may see before any score is known."""
    visible = key[None, :] <= position[:, None]
    if HAS_MASK:
        visible = visible & (tl.load(mask_ptr + batch * keys + key, mask=key < keys, other=0) != 0)[None, :]
    if HAS_SEGMENTS:
        other = tl.load(segment_ptr + batch * keys + key, mask=key < keys, other=0)
        visible = visible & (other[None, :] == segment[:, None])
    return visible


@triton.jit
def judge(q, k, gate, count, reach, visible, later, scale, threshold):
    """Scores of a tile and what follows from them.

    Every kernel calls this, so that the sign of a score, which decides on a key, is the same bits in all of them: one
    product of the same operands in the same order, then one multiplication.

    Returns (keys kept [M, N], those of them that weigh, kept keys that are nearer, logits).
    """
    M: tl.constexpr = q.shape[0]
    N: tl.constexpr = k.shape[0]
    score = product(q, tl.trans(k), tl.zeros([M, N], tl.float32)) * scale
    keep = (score > threshold) & visible
    # A sum over the later keys of the block as a product with a triangle of ones: exact, and no shuffles.
    distance = product(keep.to(tl.float16), later, tl.zeros([M, N], tl.float32)) + count[:, None]
    used = keep & (distance < reach[:, None])
    return keep, used, distance, score + gate[:, None] * distance


@triton.jit
def later_keys(N: tl.constexpr):
    key = tl.arange(0, N)
    return (key[:, None] > key[None, :]).to(tl.float16)


@triton.jit
def goes_on(count, reach, first_key, block, N: tl.constexpr):
    """Which rows need the block or one before it."""
    return (count < reach) & (first_key < (block + 1) * N)


@triton.jit
def rows_left(count, reach, first_key, block, N: tl.constexpr):
    return tl.sum(goes_on(count, reach, first_key, block, N).to(tl.int32), 0)


@triton.jit
def meet_keys(
    block, q, gate, count, reach, position, segment, later, k_ptr, mask_ptr, segment_ptr, k_stride, batch, keys,
    scale, threshold,
    N: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """A block of keys, and what rows think of it. Careful means: among numbers that are not finite."""
    key = block * N + tl.arange(0, N)
    k = load_keys(k_ptr, block * N, k_stride, keys, N, WIDTH, D)
    visible = visibility(key, position, keys, segment, mask_ptr, segment_ptr, batch, HAS_MASK, HAS_SEGMENTS)
    if CAREFUL:
        visible = visible & (tl.min(is_finite(k).to(tl.int32), 1) != 0)[None, :]
    keep, used, distance, logit = judge(q, k, gate, count, reach, visible, later, scale, threshold)
    return key, k, keep, used, distance, logit


@triton.jit
def walk_forward(
    total, largest, weights, count, block, until, q, gate, reach, position, first_key, segment, low, high,
    k_ptr, v_ptr, mask_ptr, segment_ptr, k_stride, v_stride, batch, keys, scale, threshold, drop_below,
    N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """From `block` down to `until`, or until no row is left."""
    later = later_keys(N)
    left = rows_left(count, reach, first_key, block, N)
    while (block >= until) & (left > 0):
        steps = tl.minimum(block - until + 1, AT_ONCE)
        for step in tl.range(0, steps):
            key, _k, keep, used, _distance, logit = meet_keys(
                block - step, q, gate, count, reach, position, segment, later,
                k_ptr, mask_ptr, segment_ptr, k_stride, batch, keys, scale, threshold,
                N, WIDTH, D, HAS_MASK, HAS_SEGMENTS, CAREFUL,
            )  # fmt: skip
            logit = tl.where(used, logit, -INFINITY)
            count += tl.sum(keep.to(tl.float32), 1)
            larger = tl.maximum(largest, tl.max(logit, 1))
            shrink = tl.exp(largest - larger)
            largest = larger
            weight = tl.exp(logit - largest[:, None])
            v = load_keys(v_ptr, (block - step) * N, v_stride, keys, N, VALUE_WIDTH, E)  # not before it is needed
            if CAREFUL:
                good = is_finite(v)
                weight = tl.where(used & (tl.min(good.to(tl.int32), 1) == 0)[None, :], float("nan"), weight)
                v = tl.where(good, v, 0.0)
            weights = weights * shrink + tl.sum(weight, 1)
            if DROPOUT:
                weight = tl.where(survives(low, high, key, drop_below), weight, 0.0)
            total = product(weight.to(v.dtype), v, total * shrink[:, None])
        block -= steps
        left = rows_left(count, reach, first_key, block, N)
    return total, largest, weights, count, block


@triton.jit
def meet_rows(
    unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, decay_ptr, segment_ptr, first_ptr, seed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, decay_stride, key_heads, group, queries, keys,
    WIDTH: tl.constexpr, D: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """What forward knows of rows before it walks, and where their keys and values are.

    A row that is not finite reaches no key.
    """
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    position = row % queries + keys - queries
    place = unit.to(tl.int64) * group * queries + row
    q_ptr += batch * q_batch + key_head * group * q_head
    q = load_rows(q_ptr, row // queries, q_head, row % queries, q_row, present, WIDTH, D)
    gate = tl.load(gate_ptr + place, mask=present, other=0.0)
    good = (tl.min(is_finite(q).to(tl.int32), 1) != 0) & is_finite(gate)
    reach = tl.where(present & good, row_reach(decay_ptr, decay_stride, gate, place, present), 0.0)
    first_key, segment = tl.zeros_like(position), tl.zeros_like(position)
    if HAS_MASK or HAS_SEGMENTS:
        first_key = tl.load(first_ptr + batch * keys + position, mask=present, other=keys)
    if HAS_SEGMENTS:
        segment = tl.load(segment_ptr + batch * keys + position, mask=present, other=0)
    low, high = row.to(tl.uint32), row.to(tl.uint32)
    if DROPOUT:
        low, high = dropout_words(seed_ptr, place)
    k_ptr += batch * k_batch + key_head * k_head
    v_ptr += batch * v_batch + key_head * v_head
    gate = tl.where(good, gate, 0.0)
    return batch, position, q, gate, good, reach, first_key, segment, low, high, k_ptr, v_ptr


@triton.jit
def nothing_yet(M: tl.constexpr, E: tl.constexpr):
    total, count = tl.zeros([M, E], tl.float32), tl.zeros([M], tl.float32)
    return total, tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32), count


@triton.jit
def finish_rows(
    out_ptr, state_ptr, unit, row, present, good, total, largest, weights, lap, group, queries, drop_scale,
    VALUE_WIDTH: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Store the output of rows and what backward needs of them: the logarithm of the sum of weights, and the round."""
    before = unit.to(tl.int64) * group * queries
    weights = tl.where(good, weights, float("nan"))
    inverse = tl.where(weights == 0.0, 0.0, drop_scale / weights)
    store_rows(out_ptr + before * VALUE_WIDTH, row, present, total * inverse[:, None], VALUE_WIDTH, E)
    state_ptr += 2 * before
    tl.store(state_ptr + 2 * row, largest + tl.log(tl.where(weights == 0.0, 1.0, weights)), mask=present)
    tl.store(state_ptr + 2 * row + 1, tl.zeros_like(weights) + lap, mask=present)


@triton.jit
def save_part(part_ptr, part, rows, row, present, total, largest, weights, count, block, E: tl.constexpr):
    """Rows that stopped on the way: what they have so far, and from which block they would go on."""
    column = tl.arange(0, E)
    part_ptr += part.to(tl.int64) * rows * (E + 4)
    tl.store(part_ptr + row, largest, mask=present)
    tl.store(part_ptr + rows + row, weights, mask=present)
    tl.store(part_ptr + 2 * rows + row, count, mask=present)
    tl.store(part_ptr + 3 * rows + row, tl.zeros_like(count) + block, mask=present)
    total_ptr = part_ptr + 4 * rows + row.to(tl.int64)[:, None] * E + column[None, :]
    tl.store(total_ptr, total, mask=present[:, None])


@triton.jit
def load_count(part_ptr, part, rows, row, present, E: tl.constexpr):
    return tl.load(part_ptr + part.to(tl.int64) * rows * (E + 4) + 2 * rows + row, mask=present, other=0.0)


@triton.jit
def load_part(part_ptr, part, rows, row, present, E: tl.constexpr):
    column = tl.arange(0, E)
    count = load_count(part_ptr, part, rows, row, present, E)
    part_ptr += part.to(tl.int64) * rows * (E + 4)
    largest = tl.load(part_ptr + row, mask=present, other=0.0)
    weights = tl.load(part_ptr + rows + row, mask=present, other=0.0)
    block = tl.load(part_ptr + 3 * rows + row, mask=present, other=0.0).to(tl.int32)
    total_ptr = part_ptr + 4 * rows + row.to(tl.int64)[:, None] * E + column[None, :]
    return tl.load(total_ptr, mask=present[:, None], other=0.0), largest, weights, count, block


@triton.jit(do_not_specialize=["drop_below", "first_unit", "lap", "near"])  # numbers, even where they are 1
def forward(
    q_ptr, k_ptr, v_ptr, gate_ptr, decay_ptr, out_ptr, state_ptr, part_ptr, left_ptr, order_ptr,
    mask_ptr, segment_ptr, first_ptr, seed_ptr, dirty_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, decay_stride,
    order_stride, first_unit, lap, near, parts, key_heads, group, queries, keys,
    scale, threshold, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    DECODES: tl.constexpr, PACKS: tl.constexpr, RESUMES: tl.constexpr,
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
    order_ptr += tl.program_id(1).to(tl.int64) * order_stride
    row, present = take_rows(order_ptr, tile * M + tl.arange(0, M), places, rows)
    if tl.max(present.to(tl.int32), 0) == 0:
        return
    batch, position, q, gate, good, reach, first_key, segment, low, high, k_ptr, v_ptr = meet_rows(
        unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, decay_ptr, segment_ptr, first_ptr, seed_ptr,
        q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, decay_stride, key_heads, group, queries, keys,
        WIDTH, D, HAS_MASK, HAS_SEGMENTS, DROPOUT,
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
        q, gate, reach, position, first_key, segment, low, high,
        k_ptr, v_ptr, mask_ptr, segment_ptr, k_row, v_row, batch, keys, scale, threshold, drop_below,
        N, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL,
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
        out_ptr, state_ptr, unit, row, finished, good, total, largest, weights, lap, group, queries, drop_scale,
        VALUE_WIDTH, E,
    )  # fmt: skip


@triton.jit
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


@triton.jit(do_not_specialize=["drop_below"])  # a number, even where it is 1
def decode_part(
    q_ptr, k_ptr, v_ptr, gate_ptr, decay_ptr, part_ptr, left_ptr, mask_ptr, segment_ptr, first_ptr, seed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, decay_stride, near, blocks,
    key_heads, group, queries, keys, scale, threshold, drop_below,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """A stretch of the keys beyond the near ones, as if nothing had been counted before it.

    Where in it a row ends depends on what was counted before: known when all parts were walked once, and those in which
    rows end are then walked again for these.
    """
    unit, part = tl.program_id(1), tl.program_id(0)
    if tl.load(left_ptr + unit) == 0:
        return
    row = tl.arange(0, M)
    present = row < group * queries
    batch, position, q, gate, _good, reach, first_key, segment, low, high, k_ptr, v_ptr = meet_rows(
        unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, decay_ptr, segment_ptr, first_ptr, seed_ptr,
        q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, decay_stride, key_heads, group, queries, keys,
        WIDTH, D, HAS_MASK, HAS_SEGMENTS, DROPOUT,
    )  # fmt: skip
    slot, rows = unit * (tl.num_programs(0) + 1) + part + 1, group * queries
    if ENDS:
        before = tl.zeros([M], tl.float32)
        for earlier in tl.range(0, part + 1):
            before += load_count(part_ptr, slot - 1 - earlier, rows, row, present, E)
        whole = load_count(part_ptr, slot, rows, row, present, E)
        present = present & (before < reach) & (before + whole > reach)
        if tl.max(present.to(tl.int32), 0) == 0:
            return
        reach = tl.where(present, reach - before, 0.0)
    total, largest, weights, count = nothing_yet(M, E)
    block = (keys - 1) // N - near - part * blocks
    until = tl.maximum(tl.min(first_key, 0) // N, block + 1 - blocks)
    total, largest, weights, count, block = walk_forward(
        total, largest, weights, count, block, until,
        q, gate, reach, position, first_key, segment, low, high,
        k_ptr, v_ptr, mask_ptr, segment_ptr, k_row, v_row, batch, keys, scale, threshold, drop_below,
        N, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, True,
    )  # fmt: skip
    if ENDS:  # other programs read it
        count = whole
    save_part(part_ptr, slot, rows, row, present, total, largest, weights, count, block, E)


@triton.jit
def join_parts(
    q_ptr, k_ptr, v_ptr, gate_ptr, decay_ptr, out_ptr, state_ptr, part_ptr, left_ptr,
    segment_ptr, first_ptr, seed_ptr, q_batch, q_head, q_row, decay_stride, parts,
    key_heads, group, queries, keys, drop_scale,
    M: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The near keys and all parts as one row: a part's weigh exp(g * what was counted before it) times as much."""
    unit, rows = tl.program_id(0), group * queries
    if tl.load(left_ptr + unit) == 0:
        return
    row = tl.arange(0, M)
    present = row < group * queries
    _batch, _position, _q, gate, good, reach, _first, _segment, _low, _high, k_ptr, v_ptr = meet_rows(
        unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, decay_ptr, segment_ptr, first_ptr, seed_ptr,
        q_batch, q_head, q_row, 0, 0, 0, 0, decay_stride, key_heads, group, queries, keys,
        WIDTH, D, False, False, False,
    )  # fmt: skip
    total, largest, weights, count, _block = load_part(part_ptr, unit * parts, rows, row, present, E)
    for part in tl.range(1, parts):
        its_total, its_largest, its_weights, its_count, _block = load_part(
            part_ptr, unit * parts + part, rows, row, present, E
        )
        there = (count < reach) & (its_count > 0.0)
        its_largest = tl.where(there, its_largest + gate * count, LOWEST)
        larger = tl.maximum(largest, its_largest)
        shrink, grow = tl.exp(largest - larger), tl.exp(its_largest - larger)
        total = total * shrink[:, None] + tl.where(there[:, None], its_total * grow[:, None], 0.0)
        weights = weights * shrink + tl.where(there, its_weights * grow, 0.0)
        largest = larger
        count += its_count
    finish_rows(
        out_ptr, state_ptr, unit, row, present, good, total, largest, weights, 0, group, queries, drop_scale,
        VALUE_WIDTH, E,
    )  # fmt: skip


@triton.jit
def look_at_rows(
    gate_ptr, decay_ptr, out_ptr, do_ptr, state_ptr, rows_ptr, do_batch, do_head, do_row, decay_stride,
    rows, key_heads, group, queries,
    M: tl.constexpr, VALUE_WIDTH: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """What backward knows of a row beforehand: the logarithm of its sum of weights, delta = do . out, its reach.

    A row that is not finite, or whose gradient is not, reaches no key and is marked by a delta of NaN.
    """
    unit = tl.program_id(1)
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    present = row < group * queries
    place = unit.to(tl.int64) * group * queries + row
    do_ptr += batch * do_batch + key_head * group * do_head
    do = load_rows(do_ptr, row // queries, do_head, row % queries, do_row, present, VALUE_WIDTH, E).to(tl.float32)
    out = load_rows(out_ptr, place, VALUE_WIDTH, row, 0, present, VALUE_WIDTH, E).to(tl.float32)
    gate = tl.load(gate_ptr + place, mask=present, other=0.0)
    size = tl.load(state_ptr + 2 * place, mask=present, other=0.0)
    delta = tl.sum(do * out, 1)
    good = is_finite(size) & is_finite(delta) & (tl.min(is_finite(do).to(tl.int32), 1) != 0)
    reach = row_reach(decay_ptr, decay_stride, gate, place, present)
    tl.store(rows_ptr + place, tl.where(good, size, 0.0), mask=present)
    tl.store(rows_ptr + rows + place, tl.where(good, delta, float("nan")), mask=present)
    tl.store(rows_ptr + 2 * rows + place, tl.where(good, reach, 0.0), mask=present)


@triton.jit
def walk_backward(
    dq, dg, count, block, until, q, do, gate, reach, size, delta, position, first_key, segment, low, high,
    counts_ptr, k_ptr, v_ptr, mask_ptr, segment_ptr, k_stride, v_stride, counts_stride, batch, keys,
    scale, threshold, drop_below, drop_scale,
    N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The walk of `walk_forward` again, which leaves behind what each row had counted before each block."""
    M: tl.constexpr = q.shape[0]
    later = later_keys(N)
    left = rows_left(count, reach, first_key, block, N)
    while (block >= until) & (left > 0):
        steps = tl.minimum(block - until + 1, AT_ONCE)
        for step in tl.range(0, steps):
            key, k, keep, used, distance, logit = meet_keys(
                block - step, q, gate, count, reach, position, segment, later,
                k_ptr, mask_ptr, segment_ptr, k_stride, batch, keys, scale, threshold,
                N, WIDTH, D, HAS_MASK, HAS_SEGMENTS, CAREFUL,
            )  # fmt: skip
            if CAREFUL:
                k = tl.where(is_finite(k), k, 0.0)
            tl.store(counts_ptr + (block - step).to(tl.int64) * counts_stride, count.to(tl.int32))
            count += tl.sum(keep.to(tl.float32), 1)
            v = load_keys(v_ptr, (block - step) * N, v_stride, keys, N, VALUE_WIDTH, E)
            dp = product(do, tl.trans(v), tl.zeros([M, N], tl.float32))
            if DROPOUT:
                dp = tl.where(survives(low, high, key, drop_below), dp * drop_scale, 0.0)
            ds = tl.where(used, tl.exp(logit - size[:, None]) * (dp - delta[:, None]), 0.0)
            dg += tl.sum(ds * distance, 1)
            dq = product(ds.to(k.dtype), k, dq)
        block -= steps
        left = rows_left(count, reach, first_key, block, N)
    return dq, dg, count, block


@triton.jit(do_not_specialize=["drop_below"])  # a number, even where it is 1
def backward_query(
    q_ptr, k_ptr, v_ptr, gate_ptr, do_ptr, rows_ptr, dq_ptr, dg_ptr, range_ptr, counts_ptr,
    order_ptr, mask_ptr, segment_ptr, first_ptr, seed_ptr, dirty_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, order_stride, first_unit, first_place, places, rows, key_heads, group, queries, keys,
    scale, threshold, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Gradients of M queries and gates; for `backward_key`, which key blocks were visited, and the counts with which
    they were entered."""
    unit = tl.program_id(1) + first_unit
    if (tl.load(dirty_ptr + unit) != 0) != CAREFUL:
        return
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    before = unit.to(tl.int64) * group * queries
    chunk = tl.num_programs(0) * M
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)
    order_ptr += unit.to(tl.int64) * order_stride
    row, present = take_rows(order_ptr, first_place + row_block * M + tl.arange(0, M), places, group * queries)
    position = row % queries + keys - queries
    q_ptr += batch * q_batch + key_head * group * q_head
    q = load_rows(q_ptr, row // queries, q_head, row % queries, q_row, present, WIDTH, D)
    do_ptr += batch * do_batch + key_head * group * do_head
    do = load_rows(do_ptr, row // queries, do_head, row % queries, do_row, present, VALUE_WIDTH, E)
    gate = tl.load(gate_ptr + before + row, mask=present, other=0.0)
    size = tl.load(rows_ptr + before + row, mask=present, other=0.0)
    delta = tl.load(rows_ptr + rows + before + row, mask=present, other=0.0)
    reach = tl.load(rows_ptr + 2 * rows + before + row, mask=present, other=0.0)

    k_ptr += batch * k_batch + key_head * k_head
    v_ptr += batch * v_batch + key_head * v_head
    first_key, segment = tl.zeros([M], tl.int32), tl.zeros([M], tl.int32)
    if HAS_MASK or HAS_SEGMENTS:
        first_key = tl.load(first_ptr + batch * keys + position, mask=present, other=keys)
    if HAS_SEGMENTS:
        segment = tl.load(segment_ptr + batch * keys + position, mask=present, other=0)
    low, high = row.to(tl.uint32), row.to(tl.uint32)
    if DROPOUT:
        low, high = dropout_words(seed_ptr, before + row)

    blocks = tl.cdiv(keys, N)
    counts_ptr += tl.program_id(1).to(tl.int64) * blocks * chunk + row_block * M + tl.arange(0, M)
    dq, dg, count = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    until = tl.min(first_key, 0) // N
    block = tl.max(tl.where(present, position, 0), 0) // N
    range_ptr += 2 * (tl.program_id(1) * tl.num_programs(0) + row_block)
    tl.store(range_ptr, block)
    dq, dg, count, block = walk_backward(
        dq, dg, count, block, until,
        q, do, gate, reach, size, delta, position, first_key, segment, low, high,
        counts_ptr, k_ptr, v_ptr, mask_ptr, segment_ptr, k_row, v_row, chunk, batch, keys,
        scale, threshold, drop_below, drop_scale,
        N, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL,
    )  # fmt: skip
    tl.store(range_ptr + 1, block)
    row, present = take_rows(order_ptr, first_place + row_block * M + tl.arange(0, M), places, group * queries)
    good = delta == delta
    store_rows(dq_ptr + before * WIDTH, row, present, tl.where(good[:, None], dq * scale, float("nan")), WIDTH, D)
    tl.store(dg_ptr + before + row, tl.where(good, dg, float("nan")), mask=present)


@triton.jit
def list_visitors(
    range_ptr, visitors_ptr, walks, row_blocks, key_blocks, WALKED: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """For each key block how many blocks of M rows visited it, and which, in their order; WALKED rows went together."""
    tl.static_assert(WALKED % M == 0, "rows of which only some have a count here")
    unit, key_block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    range_ptr += 2 * unit * walks
    visitors_ptr += (unit * key_blocks + key_block) * (row_blocks + 1)
    found = 0
    for start in tl.range(0, row_blocks, SIZE):
        row_block = start + tl.arange(0, SIZE)
        there = row_block < row_blocks
        pointers = range_ptr + 2 * (row_block // (WALKED // M))
        came = tl.load(pointers, mask=there, other=-1) >= key_block
        came = came & (tl.load(pointers + 1, mask=there, other=0) < key_block)
        number = tl.cumsum(came.to(tl.int32), 0)
        tl.store(visitors_ptr + found + number, row_block, mask=came)
        found += tl.sum(came.to(tl.int32), 0)
    tl.store(visitors_ptr, found)


@triton.jit
def gather_rows(
    dk, dv, k, v, readable, key, visitors_ptr, q_ptr, gate_ptr, do_ptr, rows_ptr, counts_ptr, order_ptr, seed_ptr,
    mask_ptr, segment_ptr, batch, before, first_place, places, rows, q_head, q_row, do_head, do_row,
    group, queries, keys, scale, threshold, drop_below, drop_scale,
    M: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """What every row block that visited the keys adds to their gradients."""
    N: tl.constexpr = k.shape[0]
    later = later_keys(N)
    visitors = tl.load(visitors_ptr)
    for number in tl.range(0, visitors):
        in_chunk = tl.load(visitors_ptr + 1 + number) * M + tl.arange(0, M)
        row, present = take_rows(order_ptr, first_place + in_chunk, places, group * queries)
        position = row % queries + keys - queries
        q = load_rows(q_ptr, row // queries, q_head, row % queries, q_row, present, WIDTH, D)
        do = load_rows(do_ptr, row // queries, do_head, row % queries, do_row, present, VALUE_WIDTH, E)
        gate = tl.load(gate_ptr + row, mask=present, other=0.0)
        size = tl.load(rows_ptr + row, mask=present, other=0.0)
        delta = tl.load(rows_ptr + rows + row, mask=present, other=0.0)
        reach = tl.load(rows_ptr + 2 * rows + row, mask=present, other=0.0)
        count = tl.load(counts_ptr + in_chunk).to(tl.float32)
        segment = tl.zeros([M], tl.int32)
        if HAS_SEGMENTS:
            segment = tl.load(segment_ptr + batch * keys + position, mask=present, other=0)
        low, high = row.to(tl.uint32), row.to(tl.uint32)
        if DROPOUT:
            low, high = dropout_words(seed_ptr, before + row)
        visible = readable[None, :] & visibility(
            key, position, keys, segment, mask_ptr, segment_ptr, batch, HAS_MASK, HAS_SEGMENTS
        )
        _keep, used, _distance, logit = judge(q, k, gate, count, reach, visible, later, scale, threshold)
        if CAREFUL:
            q = tl.where(is_finite(q), q, 0.0)
            do = tl.where(is_finite(do), do, 0.0)
        weight = tl.where(used, tl.exp(logit - size[:, None]), 0.0)
        dp = product(do, tl.trans(v), tl.zeros([M, N], tl.float32))
        if DROPOUT:
            survivor = survives(low, high, key, drop_below)
            dp = tl.where(survivor, dp * drop_scale, 0.0)
            dv = product(tl.trans(tl.where(survivor, weight * drop_scale, 0.0).to(do.dtype)), do, dv)
        else:
            dv = product(tl.trans(weight.to(do.dtype)), do, dv)
        ds = tl.where(used, weight * (dp - delta[:, None]), 0.0)
        dk = product(tl.trans(ds.to(q.dtype)), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["drop_below"])  # a number, even where it is 1
def backward_key(
    q_ptr, k_ptr, v_ptr, gate_ptr, do_ptr, rows_ptr, dk_ptr, dv_ptr, visitors_ptr, counts_ptr,
    order_ptr, mask_ptr, segment_ptr, seed_ptr, dirty_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, order_stride, first_unit, first_place, places, row_blocks, rows,
    key_heads, group, queries, keys,
    scale, threshold, drop_below, drop_scale,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Gradients of N keys and values, added to those of earlier rows if there were any."""
    unit = tl.program_id(1) + first_unit
    if (tl.load(dirty_ptr + unit) != 0) != CAREFUL:
        return
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    before = unit.to(tl.int64) * group * queries
    block = tl.program_id(0)
    entry = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + block
    key = block * N + tl.arange(0, N)
    there = key < keys
    k = load_keys(k_ptr + batch * k_batch + key_head * k_head, block * N, k_row, keys, N, WIDTH, D)
    v = load_keys(v_ptr + batch * v_batch + key_head * v_head, block * N, v_row, keys, N, VALUE_WIDTH, E)
    readable = there & (tl.min(is_finite(k).to(tl.int32), 1) != 0)
    q_ptr += batch * q_batch + key_head * group * q_head
    do_ptr += batch * do_batch + key_head * group * do_head
    gate_ptr += before
    rows_ptr += before
    visitors_ptr += entry * (row_blocks + 1)
    counts_ptr += entry * row_blocks * M
    order_ptr += unit.to(tl.int64) * order_stride
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, E], tl.float32)
    dk, dv = gather_rows(
        dk, dv, k, v, readable, key, visitors_ptr, q_ptr, gate_ptr, do_ptr, rows_ptr, counts_ptr, order_ptr, seed_ptr,
        mask_ptr, segment_ptr, batch, before, first_place, places, rows, q_head, q_row, do_head, do_row,
        group, queries, keys, scale, threshold, drop_below, drop_scale,
        M, WIDTH, VALUE_WIDTH, D, E, HAS_MASK, HAS_SEGMENTS, DROPOUT, CAREFUL,
    )  # fmt: skip
    dk *= scale
    dk_ptr += unit.to(tl.int64) * keys * WIDTH
    dv_ptr += unit.to(tl.int64) * keys * VALUE_WIDTH
    if ADDS:
        dk += load_rows(dk_ptr, key, WIDTH, key, 0, there, WIDTH, D)
        dv += load_rows(dv_ptr, key, VALUE_WIDTH, key, 0, there, VALUE_WIDTH, E)
    store_rows(dk_ptr, key, there, dk, WIDTH, D)
    store_rows(dv_ptr, key, there, dv, VALUE_WIDTH, E)

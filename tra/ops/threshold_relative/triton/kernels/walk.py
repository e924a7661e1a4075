"""What the kernels share: products, dropout, loads and stores, the scores of a tile, and the walk itself."""

import triton
import triton.language as tl

from tra.ops.threshold_relative import dropout

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
AT_ONCE = tl.constexpr(4)
"""Key blocks before the first look at whether rows are left: only an inner loop of known length is pipelined."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Below every logit, and finite: the difference of two infinities is NaN."""
INFINITY = tl.constexpr(float("inf"))
GOLDEN = tl.constexpr(dropout.GOLDEN)
FIRST_MULTIPLIER = tl.constexpr(dropout.FIRST_MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(dropout.SECOND_MULTIPLIER)

NUMBERS = [
    "group", "key_heads", "queries", "keys", "key_blocks", "row_blocks", "first_unit", "first_place", "places", "walks",
    "order_stride", "lap", "near", "passed", "parts", "blocks", "stretch", "slots", "drop_below",
]  # fmt: skip
"""Arguments that Triton shall not specialise on: they change while tokens are generated, and each kind of number (1, a
multiple of 16, others) would be compiled anew."""


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
    """Rows at these places of an order, or one after the other without one, and which there are.

    Loaded again after a walk, and not kept in registers meanwhile.
    """
    if order_ptr is None:  # noqa: SIM108
        row = place
    else:
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
def load_length(lengths_ptr, batch, keys):
    """How many keys a sequence has: all that there is room for, or as many as are written there."""
    length = keys
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch).to(tl.int32), 0), keys)
    return length


@triton.jit
def slot_of(segment, slots):
    """Where the first key of a segment is kept among a power of two of slots. Some segments share one."""
    return (mix(segment.to(tl.uint32)) & (slots - 1).to(tl.uint32)).to(tl.int32)


@triton.jit
def load_threshold(threshold_ptr, place, present, threshold, M: tl.constexpr):
    """Of each row: its own, or that of all."""
    limit = tl.full([M], threshold, tl.float32)
    if threshold_ptr is not None:
        limit = tl.load(threshold_ptr + place, mask=present, other=0.0)
    return limit


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
def score_tile(q, k, count, visible, later, scale, threshold):
    """Scores of a tile, which keys they keep, and how many kept keys are nearer, [M, N] each.

    Every kernel calls this, so that the sign of a score, which decides on a key, is the same bits in all of them: one
    product of the same operands in the same order, then one multiplication.
    """
    M: tl.constexpr = q.shape[0]
    N: tl.constexpr = k.shape[0]
    score = product(q, tl.trans(k), tl.zeros([M, N], tl.float32)) * scale
    keep = (score > threshold[:, None]) & visible
    # A sum over the later keys of the block as a product with a triangle of ones: exact, and no shuffles.
    distance = product(keep.to(tl.float16), later, tl.zeros([M, N], tl.float32)) + count[:, None]
    return score, keep, distance


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
def steps_until(block, until, walked):
    """Blocks until the next look at whether rows are left, of which no more than a fifth of a long walk is in vain."""
    return tl.minimum(block - until + 1, tl.maximum(AT_ONCE, walked // 4))


@triton.jit
def score_keys(
    block, q, count, position, segment, later, k_ptr, mask_ptr, segment_ptr, k_stride, batch, keys, length,
    scale, threshold,
    N: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """A block of keys, and what rows think of it. Careful means: among numbers that are not finite."""
    key = block * N + tl.arange(0, N)
    k = load_keys(k_ptr, block * N, k_stride, length, N, WIDTH, D)
    visible = visibility(key, position, keys, segment, mask_ptr, segment_ptr, batch, HAS_MASK, HAS_SEGMENTS)
    if CAREFUL:
        visible = visible & (tl.min(is_finite(k).to(tl.int32), 1) != 0)[None, :]
    score, keep, distance = score_tile(q, k, count, visible, later, scale, threshold)
    return key, k, visible, score, keep, distance


@triton.jit
def walk_forward(
    total, largest, weights, count, block, until,
    q, gate, reach, threshold, position, first_key, segment, low, high,
    k_ptr, v_ptr, mask_ptr, segment_ptr, k_stride, v_stride, batch, keys, length, scale, drop_below,
    N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, CAREFUL: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    """From `block` down to `until`, or until no row is left."""
    later = later_keys(N)
    left = rows_left(count, reach, first_key, block, N)
    walked = block * 0
    while (block >= until) & (left > 0):
        steps = steps_until(block, until, walked)
        for step in tl.range(0, steps):
            key, _k, visible, score, keep, distance = score_keys(
                block - step, q, count, position, segment, later,
                k_ptr, mask_ptr, segment_ptr, k_stride, batch, keys, length, scale, threshold,
                N, WIDTH, D, HAS_MASK, HAS_SEGMENTS, CAREFUL,
            )  # fmt: skip
            used = keep & (distance < reach[:, None])
            logit = tl.where(used, score + gate[:, None] * distance, -INFINITY)
            count += tl.sum(keep.to(tl.float32), 1)
            if LEARNS:
                # The largest visible score of a row that keeps nothing. One that keeps a key has a larger logit.
                larger = tl.maximum(largest, tl.max(tl.where(visible & (keep == 0), score, logit), 1))
            else:
                larger = tl.maximum(largest, tl.max(logit, 1))
            shrink = tl.exp(largest - larger)
            largest = larger
            weight = tl.exp(logit - largest[:, None])
            v = load_keys(v_ptr, (block - step) * N, v_stride, length, N, VALUE_WIDTH, E)  # not before it is needed
            if CAREFUL:
                good = is_finite(v)
                weight = tl.where(used & (tl.min(good.to(tl.int32), 1) == 0)[None, :], float("nan"), weight)
                v = tl.where(good, v, 0.0)
            weights = weights * shrink + tl.sum(weight, 1)
            if DROPOUT:
                weight = tl.where(survives(low, high, key, drop_below), weight, 0.0)
            total = product(weight.to(v.dtype), v, total * shrink[:, None])
        block -= steps
        walked += steps
        left = rows_left(count, reach, first_key, block, N)
    return total, largest, weights, count, block


@triton.jit
def meet_rows(
    unit, row, present, q_ptr, k_ptr, v_ptr, gate_ptr, reach_ptr, threshold_ptr, segment_ptr, first_ptr, seed_ptr,
    lengths_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, key_heads, group, queries, keys, slots,
    threshold,
    M: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """What is known of rows before they walk, and where their keys and values are."""
    batch, key_head = (unit // key_heads).to(tl.int64), (unit % key_heads).to(tl.int64)
    length = load_length(lengths_ptr, batch, keys)
    position = row % queries + length - queries
    place = unit.to(tl.int64) * group * queries + row
    q_ptr += batch * q_batch + key_head * group * q_head
    q = load_rows(q_ptr, row // queries, q_head, row % queries, q_row, present, WIDTH, D)
    gate = tl.load(gate_ptr + place, mask=present, other=0.0)
    reach = tl.load(reach_ptr + place, mask=present, other=0.0)
    threshold = load_threshold(threshold_ptr, place, present, threshold, M)
    first_key, segment = tl.zeros_like(position), tl.zeros_like(position)
    if HAS_MASK:
        first_key += tl.load(first_ptr + batch * (slots + 1))
    if HAS_SEGMENTS:
        there = present & (position >= 0)
        segment = tl.load(segment_ptr + batch * keys + position, mask=there, other=0)
        its_first_ptr = first_ptr + batch * (slots + 1) + 1 + slot_of(segment, slots)
        first_key = tl.maximum(first_key, tl.load(its_first_ptr, mask=there, other=keys))
    low, high = row.to(tl.uint32), row.to(tl.uint32)
    if DROPOUT:
        low, high = dropout_words(seed_ptr, place)
    k_ptr += batch * k_batch + key_head * k_head
    v_ptr += batch * v_batch + key_head * v_head
    return batch, length, position, q, gate, reach, threshold, first_key, segment, low, high, k_ptr, v_ptr


@triton.jit
def nothing_yet(M: tl.constexpr, E: tl.constexpr):
    total, count = tl.zeros([M, E], tl.float32), tl.zeros([M], tl.float32)
    return total, tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32), count


@triton.jit
def finish_rows(
    out_ptr, residual_ptr, state_ptr, unit, row, present, reach, total, largest, weights, lap, group, queries,
    drop_scale, VALUE_WIDTH: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Store the output of rows and what backward needs of them: the logarithm of the sum of weights, the round, and
    what rounding takes from the output. A negative reach marks a row that is not finite."""
    before = unit.to(tl.int64) * group * queries
    weights = tl.where(reach < 0.0, float("nan"), weights)
    total *= tl.where(weights == 0.0, 0.0, drop_scale / weights)[:, None]
    store_rows(out_ptr + before * VALUE_WIDTH, row, present, total, VALUE_WIDTH, E)
    if residual_ptr is not None:
        rounded = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        # An output that overflows has no residual that could mend it.
        left = tl.where(tl.abs(rounded) < INFINITY, total - rounded, 0.0)
        store_rows(residual_ptr + before * VALUE_WIDTH, row, present, left, VALUE_WIDTH, E)
    state_ptr += 2 * before
    tl.store(state_ptr + 2 * row.to(tl.int64), largest + tl.log(tl.where(weights == 0.0, 1.0, weights)), mask=present)
    tl.store(state_ptr + 2 * row.to(tl.int64) + 1, tl.zeros_like(weights) + lap, mask=present)


@triton.jit
def save_part(part_ptr, part, rows, row, present, total, largest, weights, count, block, E: tl.constexpr):
    """Rows that stopped on the way: what they have so far, and from which block they would go on."""
    column = tl.arange(0, E)
    # Threads may have read here what others write now.
    tl.debug_barrier()
    row = row.to(tl.int64)
    part_ptr += part.to(tl.int64) * rows * (E + 4)
    part_ptr += row * (E + 4)
    tl.store(part_ptr, largest, mask=present)
    tl.store(part_ptr + 1, weights, mask=present)
    tl.store(part_ptr + 2, count, mask=present)
    tl.store(part_ptr + 3, tl.zeros_like(count) + block, mask=present)
    tl.store(part_ptr[:, None] + 4 + column[None, :], total, mask=present[:, None])


@triton.jit
def load_part(part_ptr, part, rows, row, present, E: tl.constexpr):
    column = tl.arange(0, E)
    row = row.to(tl.int64)
    part_ptr += part.to(tl.int64) * rows * (E + 4)
    part_ptr += row * (E + 4)
    largest = tl.load(part_ptr, mask=present, other=0.0)
    weights = tl.load(part_ptr + 1, mask=present, other=0.0)
    count = tl.load(part_ptr + 2, mask=present, other=0.0)
    block = tl.load(part_ptr + 3, mask=present, other=0.0).to(tl.int32)
    total = tl.load(part_ptr[:, None] + 4 + column[None, :], mask=present[:, None], other=0.0)
    return total, largest, weights, count, block

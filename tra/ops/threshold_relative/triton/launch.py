"""What is launched: rounds, pieces, scratch memory, tiles. Nothing here waits for the device."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tra.ops.threshold_relative.call import Gradients, Inputs, Options, Result
from tra.ops.threshold_relative.reference import zero_gradients
from tra.ops.threshold_relative.triton import kernels, tiles, tuning
from tra.ops.threshold_relative.triton.prepare import Call, prepare, side_by_side

SCRATCH = 256 * 2**20
"""Bytes that the counts of backward may take at a time, and the rows that forward packs unless they are of one head."""
NEAR_KEYS, PART_KEYS = 512, 1024
"""Decoding walks the nearest keys first, and those beyond them in parts at once, as far as any row needs them."""
DECODE_GROWTH = 4
"""How many times as far each round of decoding goes as the one before it."""
PACKED_FROM = 4096
"""Rows of a key head, and keys, from which on rows are packed: docs/gpu.md says why."""
FIRST_ROUND, GROWTH = 128, 4
"""Keys that the first round walks beyond the diagonal, and how much further each next one goes."""
MOST_ROWS = 128
"""A multiple of the rows of every tile."""
MOST_STRETCHES = 1024
"""Programs that share the keys of a head in backward, each a stretch of whole blocks."""
LISTED = 256
"""Row blocks that `list_visitors` looks at together."""
PACKED = 1024
"""Rows that `pack_rows` takes."""


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forward(inputs: Inputs, options: Options, training: bool, packed_from: int | None = None) -> Result:
    """With rows packed from another length on if one is given, which changes no bit of it."""
    query, value = inputs.query, inputs.value
    rows = query.shape[:3]
    out = query.new_empty(*rows, value.shape[3])
    state = query.new_empty(*rows, 2, dtype=torch.float32)
    residual = None
    if training and out.dtype != torch.float32:
        residual = torch.empty_like(out, dtype=torch.bfloat16)
    if out.numel() == 0:
        return Result(out, state.zero_(), None if residual is None else residual.zero_())
    with guard(query.device):
        few = decodes(inputs)
        call = prepare(inputs, options, look_at_values=not few)
        results = {"out_ptr": out, "residual_ptr": residual, "state_ptr": state}
        kind, rounds = "decode" if few else "forward", rounds_of(call.rows, call.keys, options, packed_from)
        walk = partial(_decode, call, results) if few else partial(_walk, call, results, rounds)
        tuning.run_fastest(call.kind(kind), call.choices(kind), walk)
    return Result(out, state, residual)


def decodes(inputs: Inputs) -> bool:
    """Whether all rows of a key head fit into a tile, and there are keys enough to share among programs."""
    query, key, value = inputs[:3]
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    family = tiles.family(query.device)
    most = tiles.choices("decode", family, query.dtype, query.shape[3], value.shape[3])[0].rows
    return rows <= most and key.shape[2] > NEAR_KEYS


def _walk(call: Call, results: dict[str, Any], rounds: list[int], tile: tiles.Tile) -> None:
    """Rounds over the keys, between which the rows that go on are packed."""
    packs, state = len(rounds) > 1, results["state_ptr"]
    size = call.rows * (call.padded_value_width + 4)
    together = max(1, min(call.units, SCRATCH // (4 * size))) if packs else call.units
    part = state.new_empty(together * size) if packs else None
    for first_unit in range(0, call.units, together):
        units = min(together, call.units - first_unit)
        for lap, distance in enumerate(rounds):
            order = None
            if lap:
                classes = rounds_needed(state, call)[first_unit : first_unit + units]
                order = pack(call, classes, (lap,), tile.rows)
            # The first begins with the diagonal, and leaves heads with bad numbers to one that goes on to the end.
            for careful in (False,) if lap else (False, True):
                call.launch(
                    kernels.forward,
                    (triton.cdiv(call.rows, tile.rows), units),
                    tile,
                    **results,
                    part_ptr=part,
                    left_ptr=None,
                    order_ptr=order,
                    order_stride=0 if order is None else order.stride(0),
                    dirty_ptr=None if lap else call.dirty,
                    first_unit=first_unit,
                    lap=lap,
                    near=triton.cdiv(distance + (0 if lap else tile.rows), call.block),
                    parts=0,
                    CAREFUL=careful,
                    DECODES=False,
                    PACKS=packs and not careful,
                    RESUMES=lap > 0,
                )


def decode_rounds(blocks: int, near: int, part: int) -> list[tuple[int, int]]:
    """For each round of decoding beyond the near blocks: how many blocks were passed before it, and in how many parts
    it walks the next."""
    rounds, passed = [], near
    while passed < blocks:
        walk = min((DECODE_GROWTH - 1) * passed, blocks - passed)
        parts = triton.cdiv(walk, part)
        rounds.append((passed, parts))
        passed += parts * part
    return rounds


def _decode(call: Call, results: dict[str, Any], tile: tiles.Tile) -> None:
    """A search for bad numbers would read the whole cache: every kernel is careful from the start."""
    near, blocks = NEAR_KEYS // call.block, PART_KEYS // call.block
    rounds = decode_rounds(triton.cdiv(call.keys, call.block), near, blocks)
    parts = 1 + max(walks for _, walks in rounds)
    state = results["state_ptr"]
    part = state.new_empty(call.units * parts * call.rows * (call.padded_value_width + 4))
    left = torch.empty(len(rounds) + 1, call.units, dtype=torch.int32, device=state.device)
    call.launch(
        kernels.forward,
        (1, call.units),
        tile,
        **results,
        part_ptr=part,
        left_ptr=left[0],
        order_ptr=None,
        order_stride=0,
        dirty_ptr=None,
        first_unit=0,
        lap=0,
        near=near,
        parts=parts,
        CAREFUL=True,
        DECODES=True,
        PACKS=False,
        RESUMES=False,
    )
    for number, (passed, walks) in enumerate(rounds):
        given = {"part_ptr": part, "left_ptr": left[number], "passed": passed, "blocks": blocks, "parts": parts}
        call.launch(kernels.decode_part, (walks, call.units), tile, **given)
        call.launch(
            kernels.join_parts,
            (call.units,),
            tile,
            **results,
            **given,
            next_left_ptr=left[number + 1],
            walks=walks,
        )


def packs(inputs: Inputs, options: Options) -> bool:
    """Whether rows are packed between rounds."""
    query, key = inputs.query, inputs.key
    return len(rounds_of(query.shape[1] // key.shape[1] * query.shape[2], key.shape[2], options)) > 1


def rounds_of(rows: int, keys: int, options: Options, packed_from: int | None = None) -> list[int]:
    """How many keys each round of forward walks; one that walks them all where rows are not packed."""
    rounds = []
    if options.tolerance > 0.0 and min(rows, keys) >= (PACKED_FROM if packed_from is None else packed_from):
        rounds = [FIRST_ROUND]
        while rounds[-1] * GROWTH < keys // 2:
            rounds.append(rounds[-1] * GROWTH)
    return [*rounds, keys]


def rounds_needed(state: Tensor, call: Call) -> Tensor:
    """[units, rows]: in which round each row ended, or the next one; heads of a query side by side."""
    shape = (call.units, call.rows // call.queries, call.queries)
    return state[..., 1].reshape(shape).transpose(1, 2).reshape(call.units, call.rows)


def pack(call: Call, classes: Tensor, wanted: tuple[int, ...], rows: int) -> Tensor:
    """[units, places]: rows of the classes that are wanted, each class in its own tiles of so many; -1 for none."""
    units, size = classes.shape
    places = (triton.cdiv(size, rows) + len(wanted) - 1) * rows
    order = torch.full((units, places), -1, dtype=torch.int32, device=classes.device)
    rank = torch.stack([classes == kind for kind in wanted], 1).cumsum(2, dtype=torch.int32)
    call.launch(
        kernels.pack_rows,
        (triton.cdiv(size, PACKED), units),
        None,
        rank_ptr=rank,
        order_ptr=order,
        places=places,
        CLASSES=len(wanted),
        M=rows,
        SIZE=PACKED,
    )
    return order


class BackwardPlan(NamedTuple):
    """How backward is cut into pieces, by numbers that are known without the data."""

    stretch: int
    """Key blocks of a program of `backward_key`."""
    stretches: int
    rows: int
    """That a piece takes of a key head, a multiple of every tile's."""
    together: int
    """Key heads that a piece takes."""
    pieces: int

    @property
    def launches(self) -> int:
        """Two kernels, each for clean heads and careful for others, and a list between them."""
        return 5 * self.pieces

    def scratch(self, learns: bool, rows_of_a_tile: int) -> int:
        """Bytes of counts, of sums that pass the threshold, and of lists."""
        numbers = self.stretches * self.rows * (2 if learns else 1)
        return 4 * self.together * (numbers + self.stretches * (self.rows // rows_of_a_tile + 1))


def plan_backward(units: int, places: int, keys: int, block: int, learns: bool) -> BackwardPlan:
    """Rows of a piece are a function of the number of keys alone: pieces are summed one after the other, and a gradient
    must not depend on who shares the batch."""
    key_blocks = triton.cdiv(keys, block)
    stretch = triton.cdiv(key_blocks, MOST_STRETCHES)
    stretches = triton.cdiv(key_blocks, stretch)
    size = stretches * (8 if learns else 4)
    most = max(1, SCRATCH // (size * MOST_ROWS)) * MOST_ROWS
    rows = min(most, triton.cdiv(places, MOST_ROWS) * MOST_ROWS)
    together = max(1, min(units, SCRATCH // (size * rows)))
    pieces = triton.cdiv(units, together) * triton.cdiv(places, rows)
    return BackwardPlan(stretch, stretches, rows, together, pieces)


def backward(
    grad_out: Tensor,
    inputs: Inputs,
    result: Result,
    options: Options,
    wants_keys: bool = True,
    packed_from: int | None = None,
) -> Gradients:
    """Without those of keys and values, which are then None, if nobody wants them. Rows are packed as in forward."""
    query, key = inputs.query, inputs.key
    out, state, residual = result
    likes = (*inputs[:4], inputs.row_threshold if options.straight_through > 0.0 else None)
    if out.numel() == 0 or key.numel() == 0:
        return zero_gradients(inputs, options)
    grad_out = side_by_side(grad_out)
    with guard(query.device):
        given = {"do_ptr": grad_out, "out_ptr": out, "residual_ptr": residual, "state_ptr": state}
        call = prepare(inputs, options, look_at_values=True, **given)
        order = None
        rounds = len(rounds_of(call.rows, call.keys, options, packed_from))
        if rounds > 1:
            order = pack(call, rounds_needed(state, call), tuple(range(rounds)), MOST_ROWS)
        walk = partial(_walk_again, call, order, wants_keys)
        choices = [*product(call.choices("backward_query"), call.choices("backward_key"))]
        gradients = tuning.run_fastest(call.kind("backward"), choices, walk)
    found = (None if like is None or x is None else x.to(like.dtype) for x, like in zip(gradients, likes, strict=True))
    return Gradients(*found)  # type: ignore[arg-type]


def _walk_again(
    call: Call, order: Tensor | None, wants_keys: bool, chosen: tuple[tiles.Tile, ...]
) -> tuple[Tensor | None, ...]:
    """Backward, in pieces of as many rows and heads as scratch memory holds."""
    query, key, value = (call.common[name] for name in ("q_ptr", "k_ptr", "v_ptr"))
    device, learns = query.device, call.common["LEARNS"]
    tile, key_tile = chosen
    places = triton.cdiv(call.rows, MOST_ROWS) * MOST_ROWS if order is None else order.shape[1]
    plan = plan_backward(call.units, places, call.keys, call.block, learns)
    in_pieces = plan.rows < places

    row_numbers = call.common["gate_ptr"]
    results: dict[str, Any] = {
        "dq_ptr": torch.empty(query.shape, dtype=query.dtype, device=device),
        "dg_ptr": torch.empty_like(row_numbers),
        "dt_ptr": torch.empty_like(row_numbers) if learns else None,
    }
    # Pieces are summed in float32.
    grad_key, grad_value = (
        torch.empty(x.shape, dtype=torch.float32 if in_pieces else x.dtype, device=device) if wants_keys else None
        for x in (key, value)
    )
    row_blocks, walks = plan.rows // key_tile.rows, plan.rows // tile.rows
    counts, ranges, visitors = (
        torch.empty(plan.together * size, dtype=torch.int32, device=device)
        for size in (plan.stretches * plan.rows, 2 * walks, plan.stretches * (row_blocks + 1))
    )
    given = {
        "counts_ptr": counts,
        "sums_ptr": torch.empty_like(counts, dtype=torch.float32) if learns else None,
        "range_ptr": ranges,
        "visitors_ptr": visitors,
        "order_ptr": order,
        "order_stride": 0 if order is None else order.stride(0),
        "places": places,
        "row_blocks": row_blocks,
        "walks": walks,
        "stretch": plan.stretch,
        "WALKED": tile.rows,
        "SEVERAL": plan.stretch > 1,
    }
    for first_unit in range(0, call.units, plan.together):
        units = min(plan.together, call.units - first_unit)
        for first_place in range(0, places, plan.rows):
            piece = given | {"first_unit": first_unit, "first_place": first_place, "ADDS": first_place > 0}
            for careful in (False, True):
                call.launch(kernels.backward_query, (walks, units), tile, **piece, **results, CAREFUL=careful)
            if not wants_keys:
                continue
            grid = (plan.stretches, units)
            call.launch(kernels.list_visitors, grid, None, **piece, M=key_tile.rows, SIZE=LISTED)
            for careful in (False, True):
                call.launch(
                    kernels.backward_key, grid, key_tile, **piece, dk_ptr=grad_key, dv_ptr=grad_value, CAREFUL=careful
                )
    rows_shape = query.shape[:3]
    grad_threshold = results["dt_ptr"]
    return (
        results["dq_ptr"],
        grad_key,
        grad_value,
        results["dg_ptr"].view(rows_shape),
        None if grad_threshold is None else grad_threshold.view(rows_shape),
    )

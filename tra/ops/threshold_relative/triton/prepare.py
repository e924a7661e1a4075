"""A call as the kernels want it: tensors in the strides they take, arguments by name, and what the prologue finds."""

import math
from ctypes import c_float
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.reach import SLACK
from tra.ops.threshold_relative.triton import kernels, tiles

LOOKED_AT = 4096
"""Numbers that a program of the prologue takes, in double precision: more would not fit into registers."""
WIDEST_STRIDE = 2**31 // (LOOKED_AT // tiles.padded(1))
"""Between two keys: kernels multiply it in 32 bits by the keys of a block, of which the prologue has the most."""


class Call(NamedTuple):
    """A call as the kernels want it."""

    common: dict[str, Any]
    """Arguments by name, which in every kernel mean the same."""
    units: int
    """Key heads of the batch."""
    rows: int
    """Of each of them."""
    queries: int
    keys: int
    block: int
    """Keys in a block."""
    dirty: Tensor | None
    """[units]: whether a head holds numbers that are not finite."""
    family: str

    @property
    def padded_value_width(self) -> int:
        return self.common["E"]

    def launch(self, kernel: Any, grid: tuple[int, ...], tile: tiles.Tile | None, **given: Any) -> None:
        """Launch a kernel with those of the arguments that it has."""
        if tile is not None:
            given.setdefault("M", tile.rows)
        known = {**self.common, **given}
        options = tiles.launch_options(self.family, tile)
        kernel[grid](**{name: known[name] for name in kernel.arg_names}, **options)

    def choices(self, kernel: str) -> tuple[tiles.Tile, ...]:
        common = self.common
        return tiles.choices(kernel, self.family, common["q_ptr"].dtype, common["WIDTH"], common["VALUE_WIDTH"])

    def kind(self, what: str) -> tuple[Any, ...]:
        """Calls that are taken to be fastest with the same tiles: lengths count in powers of two."""
        query = self.common["q_ptr"]
        switches = (self.common[name] for name in ("D", "E", "HAS_MASK", "HAS_SEGMENTS", "DROPOUT", "LEARNS"))
        return what, query.device, query.dtype, self.rows.bit_length(), self.keys.bit_length(), *switches


def prepare(inputs: Inputs, options: Options, *, look_at_values: bool, **backward: Any) -> Call:
    """The call with what the prologue finds out; backward hands over its gradient and what forward left."""
    query, key, value = (side_by_side(x) for x in inputs[:3])
    mask = None if inputs.key_mask is None else inputs.key_mask.contiguous().view(torch.uint8)
    segments, lengths = (None if x is None else x.contiguous() for x in (inputs.segment_ids, inputs.key_lengths))
    (batch, heads, queries, width), key_heads, keys = query.shape, key.shape[1], key.shape[2]
    value_width, group = value.shape[3], heads // key_heads
    units, rows, device = batch * key_heads, group * queries, query.device
    family = tiles.family(device)
    block = tiles.keys_per_block(family, query.dtype, width, value_width)

    def of_rows() -> Tensor:
        return torch.empty(units * rows, dtype=torch.float32, device=device)

    first, slots = None, 0 if segments is None else slots_for(keys)
    if mask is not None or segments is not None:
        first = torch.full((batch, slots + 1), keys, dtype=torch.int32, device=device)
    dirty = torch.zeros(units, dtype=torch.int32, device=device) if look_at_values else None
    looked_at = max(1, LOOKED_AT // max(tiles.padded(width), tiles.padded(value_width)))
    key_blocks = triton.cdiv(keys, looked_at)
    norms = peaks = None
    if options.tolerance > 0.0 and options.score_bound is None and inputs.row_bound is None:
        norms = torch.empty(units * keys, dtype=torch.float32, device=device)
        peaks = torch.empty(units, key_blocks, dtype=torch.float32, device=device)
    # Half of a number in double precision each: Triton hands over float32.
    bound = _in_two((options.score_bound or 0.0) * SLACK)
    odds = _in_two(_odds(options))
    common = {
        "q_ptr": query,
        "k_ptr": key,
        "v_ptr": value,
        "gate_ptr": of_rows(),
        "reach_ptr": of_rows(),
        "threshold_ptr": None if inputs.row_threshold is None else of_rows(),
        "mask_ptr": mask,
        "segment_ptr": segments,
        "first_ptr": first,
        "lengths_ptr": lengths,
        "seed_ptr": inputs.dropout_seed,
        "dirty_ptr": dirty,
        **strides("q", query),
        **strides("k", key),
        **strides("v", value),
        "key_heads": key_heads,
        "group": group,
        "queries": queries,
        "keys": keys,
        "slots": slots,
        "scale": options.scale,
        "threshold": options.threshold,
        "temperature": options.straight_through,
        "decay_left_out": decay_left_out(options, keys),
        "drop_below": int(options.dropout * 2**32),
        "drop_scale": 1.0 / (1.0 - options.dropout),
        "N": block,
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "D": tiles.padded(width),
        "E": tiles.padded(value_width),
        "HAS_MASK": mask is not None,
        "HAS_SEGMENTS": segments is not None,
        "DROPOUT": options.dropout > 0.0,
        "LEARNS": options.straight_through > 0.0,
        **{"do_ptr": None, "out_ptr": None, "residual_ptr": None, "state_ptr": None},
        **backward,
        **strides("do", backward.get("do_ptr")),
        "size_ptr": of_rows() if backward else None,
        "delta_ptr": of_rows() if backward else None,
    }
    call = Call(common, units, rows, queries, keys, block, dirty, family)
    if first is not None:
        call.launch(kernels.look_at_masks, (triton.cdiv(keys, LOOKED_AT), batch), None, N=LOOKED_AT)
    if norms is not None or look_at_values:
        call.launch(kernels.look_at_keys, (key_blocks, units), None, norm_ptr=norms, peak_ptr=peaks, N=looked_at)
        if peaks is not None:
            peaks = peaks.cummax(1).values
    call.launch(
        kernels.look_at_rows,
        (triton.cdiv(rows, looked_at), units),
        None,
        its_gate_ptr=inputs.log_gate,
        its_threshold_ptr=inputs.row_threshold,
        its_bound_ptr=inputs.row_bound,
        norm_ptr=norms,
        peak_ptr=peaks,
        **strides("gate", inputs.log_gate),
        **strides("threshold", inputs.row_threshold),
        **strides("bound", inputs.row_bound),
        **dict(zip(("bound", "bound_rest", "odds", "odds_rest"), (*bound, *odds), strict=True)),
        M=looked_at,
        SIZE=looked_at,
    )
    return call


def slots_for(keys: int) -> int:
    """A power of two: few segments share one."""
    return 1 << (keys - 1).bit_length()


def _odds(options: Options) -> float:
    """ln(2 / tolerance), as in reach.py."""
    tolerance = options.tolerance * (1.0 - options.dropout)
    return math.log(2.0 / tolerance) if tolerance > 0.0 else math.inf


def decay_left_out(options: Options, keys: int) -> float:
    """How far a row must decay before all keys that it leaves out have gradients below the tolerance together, with
    room for rounding to float32: docs/exactness.md."""
    tolerance = options.tolerance * (1.0 - options.dropout)
    if options.straight_through == 0.0 or tolerance == 0.0:
        return math.inf
    return max(math.log(keys / (2.0 * options.straight_through * tolerance)), 0.0) * (1.0 + 1e-6)


def _in_two(number: float) -> tuple[float, float]:
    """A number in double precision as the sum of two in float32."""
    high = c_float(number).value
    return (high, number - high) if math.isfinite(high) else (math.inf, 0.0)


def strides(name: str, tensor: Tensor | None) -> dict[str, int]:
    its = (0, 0, 0) if tensor is None else tensor.stride()
    return {f"{name}_batch": its[0], f"{name}_head": its[1], f"{name}_row": its[2]}


def side_by_side(x: Tensor) -> Tensor:
    """Components next to each other; the other strides may be any that fit."""
    return x if x.stride(3) == 1 and x.stride(2) < WIDEST_STRIDE else x.contiguous()

"""The walk over keys as Triton kernels, a file for each kind. docs/gpu.md has a drawing.

A program works on rows of one key head: query heads that share it follow one another, so row r is query r % Lq of the
r // Lq-th of them. Key blocks begin at multiples of N, whatever the rows, so that a row's result does not depend on the
rows beside it: any may share a tile. Heads that hold NaN or infinity are left to a second launch that is CAREFUL.
Shapes: M rows and N keys of a tile, D and E the widths of keys and values, padded. A name means the same in every
kernel; a pointer that is None is an input that the call does not have.
"""

from tra.ops.threshold_relative.triton.kernels.backward import backward_key, backward_query, list_visitors
from tra.ops.threshold_relative.triton.kernels.decode import decode_part, join_parts
from tra.ops.threshold_relative.triton.kernels.forward import forward, pack_rows
from tra.ops.threshold_relative.triton.kernels.pieces import piece_key, resume_query
from tra.ops.threshold_relative.triton.kernels.prologue import look_at_keys, look_at_masks, look_at_rows

__all__ = [
    "backward_key",
    "backward_query",
    "decode_part",
    "forward",
    "join_parts",
    "list_visitors",
    "look_at_keys",
    "look_at_masks",
    "look_at_rows",
    "pack_rows",
    "piece_key",
    "resume_query",
]

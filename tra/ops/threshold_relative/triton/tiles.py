"""How much a program of each kernel works on at a time.

The number of keys is a function of dtype and widths alone, because the sums of a row follow key blocks. What may be
chosen for speed, rows, warps and stages, changes no result.
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int


def padded(width: int) -> int:
    """The power of two, at least 16, that a product takes."""
    return max(16, 1 << (width - 1).bit_length())


def keys_per_block(dtype: torch.dtype, width: int, value_width: int) -> int:
    """Of every kernel that this call launches."""
    return 16 if dtype == torch.float32 or padded(max(width, value_width)) > 128 else 32

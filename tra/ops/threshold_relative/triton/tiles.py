"""How much a program of each kernel works on at a time, chosen by compiling ahead of time (`make gpu-check`).

The sums of a row follow key blocks, whose size is therefore the same in all kernels; the rows of a tile, its warps and
its stages change no output, and no gradient of queries and gates.
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    rows: int
    warps: int
    stages: int = 2


def padded(width: int) -> int:
    """The power of two, at least 16, that a product takes."""
    return max(16, 1 << (width - 1).bit_length())


def family(device: torch.device) -> str:
    """Which product instruction a device has: of a warp, of several with operands in shared memory, AMD's, or none."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return "mfma"
    return {9: "hopper", 10: "blackwell"}.get(torch.cuda.get_device_capability(device)[0], "warp")


def keys_per_block(family: str, dtype: torch.dtype, width: int, value_width: int) -> int:
    """Of every kernel that a call launches."""
    if family == "interpreter":
        return 64
    return 16 if dtype == torch.float32 or padded(max(width, value_width)) > 128 else 32


def tile(kernel: str, family: str, dtype: torch.dtype, width: int, value_width: int) -> Tile:
    if family == "interpreter":
        return Tile(64, 4)
    if dtype == torch.float32:
        return FLOAT32[kernel]
    widest = padded(max(width, value_width))
    return HALF[family][kernel][0 if widest <= 64 else 1 if widest <= 128 else 2]


FLOAT32 = {"forward": Tile(32, 8), "backward_query": Tile(32, 8), "backward_key": Tile(16, 8)}
"""Products in full precision have no instruction of their own, and take registers."""

HALF: dict[str, dict[str, tuple[Tile, Tile, Tile]]] = {
    "warp": {
        "forward": (Tile(64, 4), Tile(64, 8), Tile(64, 8)),
        "backward_query": (Tile(64, 8), Tile(64, 8), Tile(32, 8)),
        "backward_key": (Tile(64, 4), Tile(32, 8), Tile(32, 8)),
    },
    "hopper": {
        "forward": (Tile(64, 4), Tile(128, 8), Tile(128, 8)),
        "backward_query": (Tile(64, 4), Tile(128, 8), Tile(128, 8)),
        "backward_key": (Tile(64, 4), Tile(128, 8), Tile(64, 4)),
    },
    "blackwell": {
        "forward": (Tile(64, 4), Tile(64, 4), Tile(64, 8)),
        "backward_query": (Tile(128, 4), Tile(64, 8), Tile(64, 8)),
        "backward_key": (Tile(64, 4), Tile(64, 8), Tile(64, 8)),
    },
    "mfma": {
        "forward": (Tile(64, 4), Tile(64, 4), Tile(64, 4)),
        "backward_query": (Tile(64, 4), Tile(64, 4), Tile(64, 4)),
        "backward_key": (Tile(64, 4), Tile(64, 4), Tile(64, 4)),
    },
}
"""By product instruction and kernel; for widths up to 64, 128 and 256."""

"""How much a program of each kernel works on at a time: tiles that compile without spills (`make gpu-check`).

The sums of a row follow key blocks, whose size is therefore the same in all kernels. Rows and warps of a tile are fixed
for a kind of processor, because the gradients of keys and values are summed in their order; what `tuning` may choose
among changes no bit.
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
    # The product instruction of a warp has all of its operands in registers.
    narrow = dtype == torch.float32 or family == "warp" or padded(max(width, value_width)) > 128
    return 16 if narrow else 32


def choices(kernel: str, family: str, dtype: torch.dtype, width: int, value_width: int) -> tuple[Tile, ...]:
    """Tiles of "forward", "decode" (its three kernels), "backward_query" or "backward_key", the default first."""
    if family == "interpreter":
        return (Tile(64, 4),)
    widest = padded(max(width, value_width))
    by_width = (FLOAT32 if dtype == torch.float32 else HALF[family])[kernel]
    rows, warps, *stages = by_width[0 if widest <= 64 else 1 if widest <= 128 else 2]
    return tuple(Tile(rows, warps, number) for number in stages)


def launch_options(family: str, tile: Tile | None) -> dict[str, int]:
    # Said at every launch, because Triton 3.10 changes the default.
    options: dict[str, int] = {"enable_fp_fusion": True}
    if tile is None:
        return options
    options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    if family in ("warp", "hopper", "blackwell"):
        # Left to itself the assembler spills where that lets one more program share the registers.
        options["maxnreg"] = MOST_REGISTERS
    return options


MOST_REGISTERS = 255
"""That a thread can have."""

Tiles = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""By kernel, for widths up to 64, 128 and 256: rows, warps, and numbers of stages to choose from."""

FLOAT32: Tiles = {
    "forward": ((32, 8, 2), (32, 8, 2), (32, 8, 2)),
    "decode": ((32, 8, 2), (32, 8, 2), (16, 8, 2)),
    "backward_query": ((32, 8, 2), (32, 8, 2), (16, 8, 2)),
    "backward_key": ((16, 8, 2), (16, 8, 2), (16, 8, 2)),
}
"""Products in full precision have no instruction of their own, and take registers."""

HALF: dict[str, Tiles] = {
    "warp": {
        "forward": ((64, 4, 2, 3), (64, 4, 2), (64, 8, 2)),
        "decode": ((64, 4, 2), (32, 4, 2), (32, 8, 2)),
        "backward_query": ((64, 4, 2), (64, 8, 2), (32, 8, 2)),
        "backward_key": ((32, 4, 2), (32, 8, 2), (32, 8, 2)),
    },
    "hopper": {
        "forward": ((64, 4, 2, 3), (128, 8, 2, 3), (32, 8, 2)),
        "decode": ((64, 4, 2), (128, 8, 2), (32, 8, 2)),
        "backward_query": ((64, 4, 2, 3), (128, 8, 2), (32, 8, 2)),
        "backward_key": ((64, 4, 2), (128, 8, 2), (32, 8, 2)),
    },
    "blackwell": {
        "forward": ((64, 4, 2, 3), (64, 4, 2), (32, 8, 2)),
        "decode": ((64, 4, 2), (64, 4, 2), (32, 8, 2)),
        "backward_query": ((64, 4, 2), (64, 8, 2), (32, 8, 2)),
        "backward_key": ((64, 8, 2), (64, 8, 2), (32, 8, 2)),
    },
    "mfma": dict.fromkeys(FLOAT32, ((64, 4, 2), (64, 4, 2), (64, 4, 2))),
}
"""By product instruction; on Hopper and Blackwell that of a warp, which takes fewer rows, serves widths over 128."""

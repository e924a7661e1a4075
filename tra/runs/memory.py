"""What a run takes at the very least, so that what cannot work is refused before the machine is brought to its knees;
and memory that is used again instead of being asked for anew."""

import ctypes
import os

from tra.environment import best_device
from tra.model import DecoderConfig
from tra.tasks import Evaluation

GIGABYTE = 1e9

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names that glibc's malloc.h gives to settings of its allocator."""
REUSED, KEPT = 64 << 20, 512 << 20
"""Bytes of the largest block that is used again, and of freed memory that is kept."""


def reuse_memory() -> None:
    """Let glibc keep freed blocks of up to `REUSED` bytes for the next step.

    By itself it gives blocks above 32 MiB back at once, such as the logits of a batch of text, and a step then waits
    for the kernel to clear new pages. Larger ones still go back: kept, they leave holes, and memory doubles. Elsewhere
    than with glibc nothing happens, nor where the environment sets its allocator or an accelerator computes. It is
    the whole process that changes, so only a process of our own asks for it: the command, and the runs of a grid.
    """
    if best_device().type != "cpu":
        return
    if os.name != "posix" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Old versions refuse so much; to set the second alone would make them give back what they now keep.
    if mallopt is not None and mallopt(M_MMAP_THRESHOLD, REUSED):
        mallopt(M_TRIM_THRESHOLD, KEPT)


def machine_bytes() -> int | None:
    """Bytes of memory that this machine has; None where it cannot be asked."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def check_training(config: DecoderConfig, rows: int, length: int) -> None:
    """Raise a ValueError if weights, gradients, moments and what backward needs of so many rows have no room."""
    kept = rows * length * (config.layers * config.width + config.vocabulary)
    _check(4 * 4 * _weights(config) + 2 * kept, f"training of batch x length = {rows:,} x {length:,} by this model")


def check_evaluation(config: DecoderConfig, evaluation: Evaluation) -> None:
    """Raise a ValueError if the weights and the keys and values of one sequence have no room."""
    cached = 2 * config.width * (config.kv_heads or config.heads) // config.heads
    stored = 4 * _weights(config) + 4 * evaluation.length * config.layers * cached
    _check(stored, f"a sequence of length {evaluation.length:,} in this model")


def _weights(config: DecoderConfig) -> int:
    """Those of embedding, head and MLPs, and two of attention's projections: every mechanism has more."""
    return 2 * config.vocabulary * config.width + config.layers * 8 * config.width**2


def _check(needed: int, what: str) -> None:
    there = machine_bytes()
    if there is not None and needed > there:
        raise ValueError(
            f"{what} must fit into memory: it takes at least {needed / GIGABYTE:.4g} GB, and this machine has "
            f"{there / GIGABYTE:.4g}"
        )

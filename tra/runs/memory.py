"""What a run takes at the very least: what cannot work is refused before the machine is brought to its knees."""

import os

from tra.model import DecoderConfig
from tra.tasks import Evaluation

GIGABYTE = 1e9


def machine() -> int | None:
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
    there = machine()
    if there is not None and needed > there:
        raise ValueError(
            f"{what} must fit into memory: it takes at least {needed / GIGABYTE:.4g} GB, and this machine has "
            f"{there / GIGABYTE:.4g}"
        )

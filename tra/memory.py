"""Peak memory of a piece of work on the CPU, read from Linux's /proc."""

import ctypes
from collections.abc import Callable
from pathlib import Path


def measurable() -> bool:
    """Whether this system can tell."""
    return Path("/proc/self/clear_refs").exists()


def added_megabytes(work: Callable[[], object]) -> float:
    """How far the process grows above its size before, at the highest moment of the work."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what earlier work freed is still held by the allocator, and would hide as much of this work
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _megabytes("VmRSS")
    work()
    return _megabytes("VmHWM") - before


def _megabytes(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")

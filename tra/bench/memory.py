"""Peak memory of a piece of work, on the CPU read from Linux's /proc, in a process that has done nothing else."""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tra import plugins
from tra.bench.timing import Work
from tra.bench.workloads import attention, native, training_step
from tra.errors import RunError
from tra.model import DecoderConfig
from tra.ops.threshold_relative import cpu


def measurable() -> bool:
    """Whether this system can tell what a process takes on the CPU."""
    return Path("/proc/self/clear_refs").exists()


def added_megabytes(work: Work) -> float:
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


def peak_of_attention(every_key: bool) -> int | None:
    """Megabytes that forward and backward of 32,768 tokens in 8 heads add to a process that holds the inputs.

    The output and the gradients alone are 4 x 67 MB. None where it cannot be read.
    """
    return round(in_fresh_process(_added_by_attention, 0.0 if every_key else None)) if measurable() else None


def _added_by_attention(tolerance: float | None) -> float:
    attention(native(), 1, 8, 256, 256, backward=True)()  # loads the kernel
    return added_megabytes(attention(native(tolerance), 1, 8, 32768, 32768, backward=True))


def peak_of_training(config: DecoderConfig, batch: int, length: int, device: str = "cpu") -> float | None:
    """Megabytes that training steps add to a process that holds model and optimiser; None where it cannot be read."""
    if device == "cpu" and not measurable():
        return None
    return in_fresh_process(_added_by_training, asdict(config), batch, length, device)


def _added_by_training(config: dict[str, Any], batch: int, length: int, device: str) -> float:
    """One step to allocate what stays, then what three more add."""
    work = training_step(DecoderConfig.from_dict(config), batch, length, device)
    work()

    def steps() -> None:
        for _ in range(3):
            work()

    if device == "cpu":
        return added_megabytes(steps)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    steps()
    return (torch.accelerator.max_memory_allocated() - before) / 2**20


PROGRAM = """
import json, sys
from importlib import import_module
from tra import plugins
from tra.ops.threshold_relative import cpu

place, name, loaded, cpu.variant, arguments = json.loads(sys.argv[1])
for plugin in loaded:
    plugins.load(plugin)
print(json.dumps(getattr(import_module(place), name)(*arguments)))
"""


def in_fresh_process(measure: Callable[..., float], *arguments: Any) -> float:
    """What a function of a module returns, called by itself in a new process that has the same plug-ins and
    variant of the kernel.

    Arguments must be what JSON can hold. A RunError has the last line of what the process complained of.
    """
    call = json.dumps([measure.__module__, measure.__name__, plugins.loaded(), cpu.variant, arguments])
    done = subprocess.run([sys.executable, "-c", PROGRAM, call], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RunError(f"peak memory: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])  # a plug-in may print as well

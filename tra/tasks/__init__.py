"""Synthetic tasks: one file each, vectorised, reproducible from a generator alone."""

from tra.tasks.base import Batch, Task
from tra.tasks.flip_flop import FlipFlop

TASKS: dict[str, Task] = {"flip_flop": FlipFlop()}

__all__ = ["TASKS", "Batch", "FlipFlop", "Task"]

"""Synthetic tasks: one file each, vectorised, reproducible from a generator alone."""

from tra.tasks.base import Batch, Task
from tra.tasks.copy import CopyRepeat, CopyUnique
from tra.tasks.flip_flop import FlipFlop
from tra.tasks.induct import InductOnce, InductRecent
from tra.tasks.instructed import Instructed

TASKS: dict[str, Task] = {
    task.name: task for task in (FlipFlop(), CopyUnique(), CopyRepeat(), InductOnce(), InductRecent(), Instructed())
}

__all__ = ["TASKS", "Batch", "CopyRepeat", "CopyUnique", "FlipFlop", "InductOnce", "InductRecent", "Instructed", "Task"]

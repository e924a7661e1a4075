"""One run on disk, and only here: its folder, batches, training, checkpoints and evaluation."""

from tra.runs.evaluation import evaluate
from tra.runs.folder import Run, load_run
from tra.runs.training import train

__all__ = ["Run", "evaluate", "load_run", "train"]

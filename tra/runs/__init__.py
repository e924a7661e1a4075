"""One run on disk, and only here: its folder, batches, training, checkpoints and evaluation."""

from tra.errors import not_installed

try:
    from tra.runs.evaluation import evaluate
    from tra.runs.folder import Run, load_run
    from tra.runs.training import train
except ModuleNotFoundError as error:
    raise not_installed(error) from None

__all__ = ["Run", "evaluate", "load_run", "train"]

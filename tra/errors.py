"""Failures that a message explains better than a traceback."""

import importlib.metadata
import re

DISTRIBUTION = "threshold-relative-attention"


class RunError(RuntimeError):
    """A run cannot go on; the message says why and what is left intact."""


class DivergenceError(RunError):
    """A loss or gradient that is not finite: the recipe's doing, not the machine's."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop and saved a checkpoint first."""


def not_installed(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error, saying which extra of this package brings the module."""
    said = f"{DISTRIBUTION}["
    if said in str(error):
        return error
    return ModuleNotFoundError(f"{error}: pip install '{said}{_extra_of(error.name)}]'", name=error.name)


def _extra_of(module: str | None) -> str:
    """What the package's own metadata says, otherwise the two that all commands together need."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # the sources alone
        requirements = []
    brings = re.compile(rf"{re.escape((module or '?').split('.')[0])}\b.* extra == [\"'](\w+)")
    return next((found[1] for found in map(brings.match, requirements) if found), "train,hub")

"""Failures that a message explains better than a traceback."""

import importlib.metadata
import re

DISTRIBUTION = "threshold-relative-attention"
INSTALL_FROM = "."
"""Where the package is installed from: a clone of the project, in whose folder the command is given. Once published
it is `DISTRIBUTION`, and nothing else need change."""


def install_command(extra: str) -> str:
    """The command that installs this package with an extra.

    Example:
        >>> install_command("hub")
        "pip install '.[hub]'"
    """
    return f"pip install '{INSTALL_FROM}[{extra}]'"


def how_to_install(extra: str) -> str:
    """The same for a message that may be read anywhere."""
    return install_command(extra) + (f" in a clone of {DISTRIBUTION}" if INSTALL_FROM == "." else "")


class RunError(RuntimeError):
    """A run cannot go on; the message says why and what is left intact."""


class DivergenceError(RunError):
    """A loss or gradient that is not finite: the recipe's doing, not the machine's."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop and saved a checkpoint first."""


def not_installed(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error, saying which extra of this package brings the module."""
    if "pip install" in str(error):
        return error
    return ModuleNotFoundError(f"{error}: {how_to_install(_extra_of(error.name))}", name=error.name)


def _extra_of(module: str | None) -> str:
    """What the package's own metadata says, otherwise the two that all commands together need."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # the sources alone
        requirements = []
    brings = re.compile(rf"{re.escape((module or '?').split('.')[0])}\b.* extra == [\"'](\w+)")
    return next((found[1] for found in map(brings.match, requirements) if found), "train,hub")

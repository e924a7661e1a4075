"""Failures that a message explains better than a traceback."""


class RunError(RuntimeError):
    """A run cannot go on; the message says why and what is left intact."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop and saved a checkpoint first."""

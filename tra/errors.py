"""Failures that a message explains better than a traceback."""


class RunError(RuntimeError):
    """A run cannot go on; the message says why and what is left intact."""


class DivergenceError(RunError):
    """A loss or gradient that is not finite: the recipe's doing, not the machine's."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop and saved a checkpoint first."""

"""One sequence over many processes: the walk of a row goes on at the neighbour, for as long as it needs keys."""

from tra.distributed.processes import ContextParallel, Traffic, context_parallel, current

__all__ = ["ContextParallel", "Traffic", "context_parallel", "current"]

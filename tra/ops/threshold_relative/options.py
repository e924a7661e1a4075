"""The operator's numbers, resolved by `api` and handed to an implementation together."""

from typing import NamedTuple


class Options(NamedTuple):
    scale: float
    threshold: float
    dropout: float
    tolerance: float
    """Error that may be traded for an early stop, relative to the largest value; 0 visits every key."""
    score_bound: float | None
    """A bound on the absolute scores, or None if the caller knows none."""

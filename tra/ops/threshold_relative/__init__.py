"""Threshold relative attention: `api` checks and chooses, `op` registers, the others compute."""

from tra.ops.threshold_relative.api import threshold_relative_attention

__all__ = ["threshold_relative_attention"]

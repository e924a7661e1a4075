"""Threshold relative attention: `api` checks, `implementations` chooses, `op` registers, the others compute."""

from tra.ops.threshold_relative.api import threshold_relative_attention
from tra.ops.threshold_relative.implementations import describe_implementations
from tra.ops.threshold_relative.varlen import threshold_relative_attention_varlen

__all__ = ["describe_implementations", "threshold_relative_attention", "threshold_relative_attention_varlen"]

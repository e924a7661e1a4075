"""Operators: attention rules as functions of tensors, registered with PyTorch."""

from tra.ops.threshold_relative import threshold_relative_attention, threshold_relative_attention_varlen

__all__ = ["threshold_relative_attention", "threshold_relative_attention_varlen"]

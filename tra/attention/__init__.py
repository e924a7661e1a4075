"""Attention mechanisms: one file each, one contract, interchangeable in the decoder."""

from tra.attention.base import Attention
from tra.attention.cache import Cache
from tra.attention.rope import RotaryAttention
from tra.attention.threshold_relative import ThresholdRelativeAttention

MECHANISMS: dict[str, type[Attention]] = {
    "rope": RotaryAttention,
    "tra": ThresholdRelativeAttention,
}

__all__ = ["MECHANISMS", "Attention", "Cache", "RotaryAttention", "ThresholdRelativeAttention"]

"""Threshold relative attention: attention that keeps working past its training length."""

from tra.attention import MECHANISMS, Cache, Context, ThresholdRelativeAttention
from tra.generation import Sampling
from tra.model import SIZES, Decoder, DecoderConfig, sized
from tra.ops import threshold_relative_attention
from tra.version import __version__

__all__ = [
    "MECHANISMS",
    "SIZES",
    "Cache",
    "Context",
    "Decoder",
    "DecoderConfig",
    "Sampling",
    "ThresholdRelativeAttention",
    "__version__",
    "sized",
    "threshold_relative_attention",
]

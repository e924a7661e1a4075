"""Attention mechanisms: one file each, one contract, interchangeable in the decoder."""

from tra.attention.ablations import DistanceOnlyAttention, OrdinaryDistanceAttention, ThresholdOnlyAttention
from tra.attention.alibi import LinearBiasAttention
from tra.attention.asentmax import AdaptiveScaleEntmaxAttention
from tra.attention.base import Attention, Context
from tra.attention.cache import Cache
from tra.attention.cope import ContextualPositionAttention
from tra.attention.differential import DifferentialAttention
from tra.attention.fire import InterpolatedBiasAttention
from tra.attention.fot import ForgettingAttention
from tra.attention.kerple import KernelBiasAttention
from tra.attention.nape import HalfBiasAttention
from tra.attention.nope import UnpositionedAttention
from tra.attention.options import Option, options_of
from tra.attention.path import PathAttention
from tra.attention.rope import RotaryAttention
from tra.attention.selective import SelectiveAttention
from tra.attention.sinusoidal import SinusoidalAttention
from tra.attention.ssmax import ScalableSoftmaxAttention
from tra.attention.stick_breaking import StickBreakingAttention
from tra.attention.t5 import BucketBiasAttention
from tra.attention.threshold_relative import LearnedThresholdAttention, ThresholdRelativeAttention

MECHANISMS: dict[str, type[Attention]] = {
    "tra": ThresholdRelativeAttention,
    "tra-learned": LearnedThresholdAttention,
    "rope": RotaryAttention,
    "nope": UnpositionedAttention,
    "sinusoidal": SinusoidalAttention,
    "alibi": LinearBiasAttention,
    "t5": BucketBiasAttention,
    "kerple": KernelBiasAttention,
    "fire": InterpolatedBiasAttention,
    "fot": ForgettingAttention,
    "cope": ContextualPositionAttention,
    "stick-breaking": StickBreakingAttention,
    "differential": DifferentialAttention,
    "selective": SelectiveAttention,
    "path": PathAttention,
    "nape": HalfBiasAttention,
    "ssmax": ScalableSoftmaxAttention,
    "asentmax": AdaptiveScaleEntmaxAttention,
    "tra-threshold-only": ThresholdOnlyAttention,
    "tra-distance-only": DistanceOnlyAttention,
    "tra-ordinary-distance": OrdinaryDistanceAttention,
}
"""Every mechanism of this package, by the name that a config, a recipe and a command give it."""

__all__ = [
    "MECHANISMS",
    "Attention",
    "Cache",
    "Context",
    "Option",
    "RotaryAttention",
    "ThresholdRelativeAttention",
    "options_of",
]

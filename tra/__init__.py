"""Threshold relative attention: attention that keeps working past its training length.

Names are imported when they are first used: ``tra --help`` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tra.version import __version__

if TYPE_CHECKING:
    from tra.attention import MECHANISMS, Cache, Context, ThresholdRelativeAttention
    from tra.generation import Sampling
    from tra.model import SIZES, Decoder, DecoderConfig, sized
    from tra.ops import threshold_relative_attention, threshold_relative_attention_varlen

_MODULES = {
    "tra.attention": ("MECHANISMS", "Cache", "Context", "ThresholdRelativeAttention"),
    "tra.generation": ("Sampling",),
    "tra.model": ("SIZES", "Decoder", "DecoderConfig", "sized"),
    "tra.ops": ("threshold_relative_attention", "threshold_relative_attention_varlen"),
}
_SUBMODULES = ("attention", "errors", "generation", "lookup", "model", "ops", "plugins", "signatures")
"""What `import tra` alone has always given."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(module), name)
            return value
    if name in _SUBMODULES:
        return importlib.import_module(f"tra.{name}")
    raise AttributeError(f"module 'tra' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


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
    "threshold_relative_attention_varlen",
]

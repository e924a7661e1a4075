"""The implementations of the operator, in the order in which "auto" asks them."""

import warnings

import torch

from tra.lookup import lookup
from tra.ops.threshold_relative import cpu, reference, triton
from tra.ops.threshold_relative.call import Implementation, Inputs, Options

IMPLEMENTATIONS: dict[str, Implementation] = {"cpu": cpu, "triton": triton, "reference": reference}
"""The last one refuses nothing."""

_said: set[str] = set()


def choose(impl: str, inputs: Inputs, options: Options) -> str:
    """The name of the implementation that takes the call: the one asked for, or the first that is willing."""
    if impl != "auto":
        if impl not in IMPLEMENTATIONS:
            lookup({"auto": None, **IMPLEMENTATIONS}, impl, "impl")  # raises
        reason = IMPLEMENTATIONS[impl].refusal(inputs, options)
        if reason is not None:
            raise ValueError(f"impl {impl!r} {reason}")
        return impl
    for name, implementation in IMPLEMENTATIONS.items():
        if hasattr(implementation, "only_by_name") and implementation.only_by_name(inputs):
            continue
        reason = implementation.refusal(inputs, options)
        if reason is None:
            return name
        if hasattr(implementation, "passed_over") and not torch.compiler.is_compiling():
            advice = implementation.passed_over(reason)
            if advice is not None and advice not in _said:
                _said.add(advice)
                warnings.warn(f"threshold_relative_attention {advice}", stacklevel=3)
    raise AssertionError("every implementation refused")


def describe_implementations() -> dict[str, str]:
    """What each implementation is on this machine and what it refuses, in the order in which "auto" asks them.

    Example:
        >>> list(describe_implementations())
        ['cpu', 'triton', 'reference']
    """
    return {name: implementation.about() for name, implementation in IMPLEMENTATIONS.items()}

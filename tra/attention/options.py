"""The options of a mechanism, read from the signatures of its class and base classes."""

import inspect
from typing import TYPE_CHECKING

from tra.signatures import Option, options_in

if TYPE_CHECKING:
    from tra.attention.base import Attention

GIVEN_BY_THE_DECODER = ("layer", "dropout", "head_width", "bias")
"""Keyword-only arguments of every mechanism that are no options."""


def options_of(mechanism: "type[Attention]") -> dict[str, Option]:
    """The options of a mechanism by name, those that all mechanisms share first.

    A class whose arguments end in ``**shared`` passes these on, so it also has the options of its base class.

    Example:
        >>> from tra.attention import MECHANISMS
        >>> list(options_of(MECHANISMS["cope"]))
        ['qk_norm', 'positions']
    """
    by_class: list[dict[str, Option]] = []
    for owner in mechanism.__mro__:
        if "__init__" not in vars(owner):
            continue
        by_class.append(options_in(owner.__init__))  # type: ignore[misc]
        parameters = inspect.signature(owner.__init__).parameters.values()  # type: ignore[misc]
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    found: dict[str, Option] = {}
    for options in reversed(by_class):
        found.update(options)
    return {name: option for name, option in found.items() if name not in GIVEN_BY_THE_DECODER}

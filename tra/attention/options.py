"""The options of a mechanism: which there are, as its signature says, and whether given ones are right."""

import difflib
import inspect
import math
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from tra.attention.base import Attention

GIVEN_BY_THE_DECODER = ("layer", "dropout")
"""Keyword-only arguments of every mechanism that are no options."""


class Option(NamedTuple):
    """One keyword-only argument of a mechanism."""

    name: str
    default: Any
    """`inspect.Parameter.empty` if it has none."""
    annotation: Any
    """`Any` if it has none."""


def options_of(mechanism: "type[Attention]") -> dict[str, Option]:
    """The options of a mechanism by name, those that all mechanisms share first.

    A class whose arguments end in ``**shared`` hands these on, so the options of the class that it extends are its too.

    Example:
        >>> from tra.attention import MECHANISMS
        >>> list(options_of(MECHANISMS["cope"]))
        ['qk_norm', 'positions']
    """
    by_class: list[dict[str, Option]] = []
    for owner in mechanism.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = inspect.signature(owner.__init__).parameters.values()  # type: ignore[misc]
        annotations = get_type_hints(owner.__init__)  # type: ignore[misc]
        by_class.append(
            {
                parameter.name: Option(parameter.name, parameter.default, annotations.get(parameter.name, Any))
                for parameter in parameters
                if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in GIVEN_BY_THE_DECODER
            }
        )
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    found: dict[str, Option] = {}
    for options in reversed(by_class):
        found.update(options)
    return found


def checked_options(mechanism: "type[Attention]", name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options in the order of the signature, whole numbers made float where a float is asked for.

    Raises a ValueError for one that the mechanism, called ``name``, does not have, and for a value of the wrong type.
    What a value means, its range for instance, the mechanism checks when it is made.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"attention_options must be a dict of options, got {given!r}")
    options = options_of(mechanism)
    for key in given:
        if key not in options:
            raise ValueError(among(f"attention_options of {name}", options, key))
    checked = {}
    for option in options.values():
        if option.name in given:
            value = given[option.name]
            wrong = mismatch(value, option.annotation)
            if wrong is not None:
                raise ValueError(f"{option.name} in attention_options of {name} must be {wrong}")
            checked[option.name] = float(value) if _means_float(value, option.annotation) else value
        elif option.default is inspect.Parameter.empty:
            raise ValueError(f"{option.name} must be given in attention_options of {name}")
    return checked


def mismatch(value: Any, annotation: Any) -> str | None:
    """What a value should have been, and what it is instead; None if it is right.

    Example:
        >>> mismatch("3", int | None)
        "a whole number or None, got '3'"
    """
    choices = _choices(annotation)
    if any(_matches(value, choice) for choice in choices):
        return None
    nearest = _hint(value, [choice for choice in map(_literal, choices) if isinstance(choice, str)])
    return f"{' or '.join(_expected(choice) for choice in choices)}, got {value!r}{nearest}"


def among(argument: str, names: Iterable[str], got: Any) -> str:
    """The message for a name that is not among these."""
    names = list(names)
    return f"{argument} must be among {', '.join(names)}, got {got!r}{_hint(got, names)}"


def written(value: Any) -> str:
    """An option's value as short as it can be without being another."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _choices(annotation: Any) -> list[Any]:
    """An annotation taken apart where it says "or"; each value of a Literal by itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    if get_origin(annotation) is Literal:
        return [Literal[value] for value in get_args(annotation)]
    return [annotation]


def _literal(choice: Any) -> Any:
    return get_args(choice)[0] if get_origin(choice) is Literal else None


def _matches(value: Any, choice: Any) -> bool:
    if choice is Any:
        return True
    if get_origin(choice) is Literal:
        return type(value) is type(_literal(choice)) and value == _literal(choice)
    if choice is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if choice is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(choice) or choice)


def _expected(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return repr(_literal(choice))
    names = {float: "a finite number", int: "a whole number", bool: "True or False", str: "a string"}
    if choice is type(None):
        return "None"
    return names.get(choice, f"of type {getattr(choice, '__name__', choice)}")


def _means_float(value: Any, annotation: Any) -> bool:
    choices = _choices(annotation)
    return type(value) is int and float in choices and int not in choices


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _hint(got: Any, names: list[str]) -> str:
    near = difflib.get_close_matches(str(got), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""

"""Options of mechanisms and tasks: which there are, as a signature says, and whether given ones are right."""

import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tra.lookup import suggestion

LONGEST = 1 << 24
"""Of sequences: the kernel counts so many keys."""
MOST = 99_999_999
"""Of anything else: far beyond what is ever asked for, and the folders of checkpoints have eight digits."""


class Option(NamedTuple):
    """One argument that has a name."""

    name: str
    default: Any
    """`inspect.Parameter.empty` if it has none."""
    annotation: Any
    """`Any` if it has none."""


def options_in(make: Callable[..., Any], kinds: Iterable[Any] = (inspect.Parameter.KEYWORD_ONLY,)) -> dict[str, Option]:
    """The arguments of these kinds that a function or class takes, by name."""
    function = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    annotations = get_type_hints(getattr(function, "func", function))
    return {
        parameter.name: Option(parameter.name, parameter.default, annotations.get(parameter.name, Any))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in kinds and parameter.name != "self"
    }


def checked_options(
    options: Mapping[str, Option], given: Mapping[str, Any], argument: str, owner: str
) -> dict[str, Any]:
    """The given options in the order of the signature, whole numbers made float where a float is asked for.

    Raises a ValueError for one that the owner does not have, and for a value of the wrong type. What a value means, its
    range for instance, the owner checks when it is made.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{argument} must be a dict of options, got {given!r}")
    for key in given:
        if key not in options:
            raise ValueError(among(f"{argument} of {owner}", options, key))
    checked = {}
    for option in options.values():
        if option.name in given:
            value = given[option.name]
            wrong = mismatch(value, option.annotation)
            if wrong is not None:
                raise ValueError(f"{option.name} in {argument} of {owner} must be {wrong}")
            checked[option.name] = float(value) if _means_float(value, option.annotation) else value
        elif option.default is inspect.Parameter.empty:
            raise ValueError(f"{option.name} must be given in {argument} of {owner}")
    return checked


def check_types(instance: Any, what: str = "", but: Collection[str] = ()) -> None:
    """Raise a ValueError for a field of a dataclass that is not of the type of its annotation."""
    for name, annotation in get_type_hints(type(instance)).items():
        if name not in but and (wrong := mismatch(getattr(instance, name), annotation)) is not None:
            raise ValueError(f"{name}{what} must be {wrong}")


def check_count(name: str, number: int | None, most: int) -> None:
    """Raise a ValueError for a whole number, if there is one, that is less than 1 or more than ``most``."""
    if number is not None and number < 1:
        raise ValueError(f"{name} must be at least 1, got {number:,}")
    if number is not None and number > most:
        raise ValueError(f"{name} must be at most {most:,}, got {number:,}")


def mismatch(value: Any, annotation: Any) -> str | None:
    """What a value should have been, and what it is instead; None if it is right.

    Example:
        >>> mismatch("3", int | None)
        "a whole number or None, got '3'"
    """
    choices = _choices(annotation)
    if any(_matches(value, choice) for choice in choices):
        return None
    nearest = suggestion(value, [choice for choice in map(_literal, choices) if isinstance(choice, str)])
    return f"{' or '.join(_expected(choice) for choice in choices)}, got {value!r}{nearest}"


def among(argument: str, names: Iterable[str], got: Any) -> str:
    """The message for a name that is not among these."""
    names = list(names)
    what = f"must be among {', '.join(names)}" if names else "must be empty: there are none"
    return f"{argument} {what}, got {got!r}{suggestion(got, names)}"


def format_value(value: Any) -> str:
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
    names = {
        float: "a finite number",
        int: "a whole number",
        bool: "True or False",
        str: "a string",
        Path: "a path",
    }
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

"""Choosing by name from a plain dict, with a suggestion for a misspelt one."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Value = TypeVar("Value")


def lookup(table: Mapping[str, Value], name: str, argument: str) -> Value:
    """Return ``table[name]``, or raise a ValueError that names the argument, the choices and the nearest one."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise ValueError(f"{argument} must be one of {', '.join(sorted(table))}, got {name!r}{suggestion(name, table)}")


def suggestion(got: object, names: Iterable[str]) -> str:
    """The end of a message about a name that is not among these: the nearest one, if one is near."""
    near = difflib.get_close_matches(str(got), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""

"""Choosing by name from a plain dict, with a suggestion for a misspelt one."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def lookup(table: Mapping[str, Value], name: str, argument: str) -> Value:
    """Return ``table[name]``, or raise a ValueError that names the argument, the choices and the nearest one."""
    if isinstance(name, str) and name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{argument} must be one of {', '.join(sorted(table))}, got {name!r}{hint}")

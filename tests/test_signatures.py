"""Options as a signature says them, and what is said of wrong ones."""

from functools import partial
from inspect import Parameter
from typing import Any, Literal

import pytest

from tra.signatures import among, checked_options, format_value, mismatch, options_in


def make(
    width: int,
    *,
    rate: float = 0.5,
    kind: Literal["plain", "fancy", 3] = "plain",
    depth: int | None = None,
    table: dict[str, int] | None = None,
    anything=None,
) -> None: ...


OPTIONS = options_in(make)


def test_options_are_the_arguments_that_have_names() -> None:
    assert list(OPTIONS) == ["rate", "kind", "depth", "table", "anything"]
    assert (OPTIONS["rate"].default, OPTIONS["rate"].annotation) == (0.5, float)
    assert OPTIONS["anything"].annotation is Any
    both = options_in(make, (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY))
    assert list(both) == ["width", *OPTIONS]
    assert both["width"].default is Parameter.empty


def test_options_of_a_class_are_those_of_its_construction() -> None:
    class Made:
        def __init__(self, size: int, *, colour: str = "red") -> None: ...

    assert list(options_in(Made)) == ["colour"]


def test_options_of_a_function_that_has_some_arguments_already() -> None:
    assert options_in(partial(make, 3))["rate"].annotation is float


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {}),
        ({"depth": 3, "rate": 2}, {"rate": 2.0, "depth": 3}),
        ({"kind": 3}, {"kind": 3}),
        ({"depth": None, "table": {"a": 1}}, {"depth": None, "table": {"a": 1}}),
        ({"anything": object}, {"anything": object}),
    ],
)
def test_right_options_come_back_in_the_order_of_the_signature(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = checked_options(OPTIONS, given, "options", "make")
    assert list(found.items()) == list(expected.items())
    assert {name: type(value) for name, value in found.items()} == {k: type(v) for k, v in expected.items()}


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"rat": 1.0},
            "options of make must be among rate, kind, depth, table, anything, got 'rat'; did you mean 'rate'?",
        ),
        ({"rate": "fast"}, "rate in options of make must be a finite number, got 'fast'"),
        ({"rate": True}, "rate in options of make must be a finite number, got True"),
        ({"rate": float("nan")}, "rate in options of make must be a finite number, got nan"),
        ({"rate": 10**400}, "rate in options of make must be a finite number, got 1000"),
        (
            {"kind": "fancyy"},
            "kind in options of make must be 'plain' or 'fancy' or 3, got 'fancyy'; did you mean 'fancy'?",
        ),
        ({"kind": 3.0}, "kind in options of make must be 'plain' or 'fancy' or 3, got 3.0"),
        ({"depth": 1.5}, "depth in options of make must be a whole number or None, got 1.5"),
        ({"table": [1]}, "table in options of make must be of type dict or None, got [1]"),
        ("rate=1", "options must be a dict of options, got 'rate=1'"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_was_expected(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        checked_options(OPTIONS, given, "options", "make")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_option_without_a_default_must_be_given() -> None:
    needed = options_in(make, (Parameter.POSITIONAL_OR_KEYWORD,))
    with pytest.raises(ValueError, match="width must be given in options of make"):
        checked_options(needed, {}, "options", "make")


def test_where_there_are_no_options_none_is_right() -> None:
    assert among("options of make", [], "x") == "options of make must be empty: there are none, got 'x'"


@pytest.mark.parametrize(
    "value, annotation, right",
    [
        (True, bool, True),
        (1, bool, False),
        (True, int, False),
        (1, float, True),
        ("a", str, True),
        (None, str, False),
        ((1, 2), tuple[int, ...], True),
        ([1, 2], tuple[int, ...], False),
        (3, int | str, True),
    ],
)
def test_values_match_their_annotation(value: Any, annotation: Any, right: bool) -> None:
    assert (mismatch(value, annotation) is None) == right


@pytest.mark.parametrize(
    "value, text",
    [
        (10_000.0, "10000"),
        (0.1, "0.1"),
        (1e-6, "1e-06"),
        (1234567.5, "1234567.5"),
        (True, "True"),
        ("a", "a"),
        (3, "3"),
    ],
)
def test_a_value_is_written_as_short_as_can_be_without_being_another(value: Any, text: str) -> None:
    assert format_value(value) == text

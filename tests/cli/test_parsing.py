"""How options are written, and one line for each way to get them wrong."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.cli.calling import Captured, fails
from tra.cli.parsing import Common, format_settings, given_options, option_names, parse, settings


@dataclass(frozen=True)
class Sizes:
    width: int = 3
    learning_rate: float = 0.5


@dataclass(frozen=True)
class Some(Common):
    """Options of every kind."""

    sizes: Sizes = Sizes()
    names: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    number: int | None = None
    json: bool = False


@pytest.mark.parametrize("words", ["8 16 32", "8,16,32", "8, 16, 32", "8,16 32,"])
def test_lists_are_written_with_spaces_or_commas(words: str) -> None:
    found = parse(Some, ["--lengths", *words.split(), "--names", *words.split()], "some")
    assert found.lengths == (8, 16, 32)
    assert found.names == ("8", "16", "32")


@pytest.mark.parametrize("words", ["a=1 b=x", "a=1,b=x", "a=1, b=x", '{"a":1,"b":"x"}'])
def test_settings_are_a_list_too(words: str) -> None:
    assert parse(Some, ["--options", *words.split()], "some").options == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    "text, value",
    [
        ("10000", 10000),
        ("10_000", 10000),
        ("1e4", 1e4),
        ("-0.5", -0.5),
        ("true", True),
        ("False", False),
        ("none", None),
        ("null", None),
        ("yarn", "yarn"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_setting_is_what_it_says(text: str, value: Any) -> None:
    (found,) = settings([f"x={text}"]).values()
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("values", [{"a": 1, "b": 0.5, "c": None, "d": True, "e": "yarn"}, {}])
def test_settings_can_be_written_and_read_again(values: dict[str, Any]) -> None:
    assert settings(format_settings(values)) == values


def test_options_that_are_needed_first_are_found_in_every_spelling() -> None:
    words = ["word", "--plugin", "a,b", "c", "--seed", "1", "--plugin=d", "other", "--task_options=last=1", "--name"]
    assert given_options(words) == {
        "": ["word", "other"],
        "--plugin": ["a,b", "c", "d"],
        "--seed": ["1"],
        "--task-options": ["last=1"],
        "--name": [],
    }
    assert given_options(["--model.options", "a=1"])["--model.attention-options"] == ["a=1"]


def test_the_names_of_options_are_those_that_are_understood() -> None:
    for name in option_names(Some):
        given = {"--options": ["a=1"], "--json": [], "--no-json": []}.get(name, ["3"])
        assert isinstance(parse(Some, [name, *given], "some"), Some)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sizes.width", "x"], "--sizes.width must be a whole number, got 'x'"),
        (["--sizes.width", "2.5"], "--sizes.width must be a whole number, got '2.5'"),
        (["--sizes.learning-rate", "x"], "--sizes.learning-rate must be a number, got 'x'"),
        (["--number", "x"], "--number must be a whole number, got 'x'"),
        (["--lengths", "8,x"], "--lengths must be a whole number, got 'x'"),
        (["--options", "theta"], "--options must be NAME=VALUE, got 'theta'"),
        (["--options", "=3"], "--options must be NAME=VALUE, got '=3'"),
        (["--options", "{a"], "--options must be NAME=VALUE pairs or a JSON object: Expecting property name"),
        (["--jsno"], "--jsno is no option of tra some; did you mean --json?"),
        (["--lengts=3"], "--lengts is no option of tra some; did you mean --lengths?"),
        (["--slr", "3"], "--slr is no option of tra some; did you mean --sizes.learning-rate?"),
        (["--zzz"], "--zzz is no option of tra some; see tra some --help"),
        (["word"], "tra some does not expect 'word' here; see tra some --help"),
        (["--number"], "Missing value for argument '--number'"),
    ],
)
@pytest.mark.parametrize("boxes", [True, False])
def test_what_is_wrong_is_one_line(
    arguments: list[str], message: str, boxes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On consoles that show boxes, and on others."""
    monkeypatch.setattr("tyro._fmtlib._should_use_utf8_drawing_chars", lambda: boxes)
    with pytest.raises(ValueError, match=r".") as error:
        parse(Some, arguments, "some")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("command", ["evaluate", "inspect", "export", "generate"])
def test_what_must_be_given_is_named(command: str, capsys: Captured) -> None:
    assert fails([command], capsys) == f"RUN must be given; see tra {command} --help"
    assert fails(["generate", "nowhere"], capsys) == "--prompt must be given; see tra generate --help"
    assert fails(["reproduce"], capsys) == "NAME|FILE must be given; see tra reproduce --help"

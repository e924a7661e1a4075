"""How options are written, and one line for each way to get them wrong."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cli.calling import Captured, fails
from tra.cli.parsing import Common, arguments_of, format_settings, help_text, parse, settings


@dataclass(frozen=True)
class Sizes:
    width: int = 3
    learning_rate: float = 0.5


@dataclass(frozen=True)
class All:
    sizes: Sizes = Sizes()
    schedule: Literal["cosine", "constant"] = "cosine"
    """How it falls."""
    rate: float | Literal["usual"] = "usual"
    mixed: bool = True
    secret: int = field(default=0, metadata={"hidden": True})


@dataclass(frozen=True)
class Some(Common):
    """Options of every kind."""

    place: Path | None = field(default=None, metadata={"positional": "PLACE"})
    all: dict[str, Any] = field(default_factory=dict, metadata={"flat": All})
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


def test_an_option_given_several_times_and_in_several_spellings_is_taken_as_one() -> None:
    found = parse(
        Some, ["--names", "a,b", "c", "--number", "1", "--names=d", "--options=a=1", "--options", "b=2"], "some"
    )
    assert found.names == ("a", "b", "c", "d")
    assert found.options == {"a": 1, "b": 2}
    assert parse(Some, ["--number", "1", "--number=2"], "some").number == 2
    assert (
        parse(Some, ["--sizes.learning_rate", "1"], "some").all
        == parse(Some, ["--sizes.learning-rate", "1.0"], "some").all
    )


def test_of_the_options_of_another_dataclass_those_that_are_given_are_known() -> None:
    assert parse(Some, [], "some").all == {}
    words = ["--sizes.width", "4", "--rate", "3", "--no-mixed", "--schedule=constant"]
    found = parse(Some, words, "some").all
    assert found == {"sizes.width": 4, "rate": 3.0, "mixed": False, "schedule": "constant"}
    assert type(found["rate"]) is float
    assert parse(Some, ["--rate", "usual", "--mixed"], "some").all == {"rate": "usual", "mixed": True}


def test_what_is_given_by_its_place_may_stand_between_options() -> None:
    for words in (["here", "--json"], ["--json", "here"], ["--number", "3", "here", "--no-json", "--json"]):
        found = parse(Some, words, "some")
        assert (found.place, found.json) == (Path("here"), True)


def test_help_has_every_option_with_its_text_and_default() -> None:
    shown = help_text(Some, "some", All(Sizes(7), rate=0.25))
    assert shown.startswith("usage: tra some PLACE [options]")
    lines = " ".join(shown.split())
    assert "--schedule cosine|constant How it falls. (default: cosine)" in lines
    assert "--sizes.width INT (default: 7)" in lines
    assert "--rate FLOAT|usual (default: 0.25)" in lines
    assert "--mixed, --no-mixed (default: True)" in lines
    assert "positional arguments: PLACE options: -h" in lines
    assert lines.index("--json, --no-json") < lines.index("--plugin [STR ...] Modules, or files")
    assert "secret" not in lines
    with pytest.raises(ValueError, match="--secret is no option of tra some"):
        parse(Some, ["--secret", "3"], "some")


def test_the_names_of_options_are_those_that_are_understood() -> None:
    for option in arguments_of(Some):
        given = {"--plugin": ["json"], "--options": ["a=1"], "--schedule": ["cosine"]}.get(
            option.name, [] if option.kind is bool else ["3"]
        )
        for name in [] if option.is_positional else option.names:
            assert isinstance(parse(Some, [name, *given], "some"), Some)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sizes.width", "x"], "--sizes.width must be a whole number, got 'x'"),
        (["--sizes.width", "2.5"], "--sizes.width must be a whole number, got '2.5'"),
        (["--sizes.learning-rate", "x"], "--sizes.learning-rate must be a finite number, got 'x'"),
        (["--number", "x"], "--number must be a whole number or None, got 'x'"),
        (["--lengths", "8,x"], "--lengths must be a whole number, got 'x'"),
        (["--options", "theta"], "--options must be NAME=VALUE, got 'theta'"),
        (["--options", "=3"], "--options must be NAME=VALUE, got '=3'"),
        (["--options", "{a"], "--options must be NAME=VALUE pairs or a JSON object: Expecting property name"),
        (["--jsno"], "--jsno is no option of tra some; did you mean --json?"),
        (["--lengts=3"], "--lengts is no option of tra some; did you mean --lengths?"),
        (["--slr", "3"], "--slr is no option of tra some; did you mean --sizes.learning-rate?"),
        (["--zzz"], "--zzz is no option of tra some; see tra some --help"),
        (["here", "word"], "tra some does not expect 'word' here; see tra some --help"),
        (["--number"], "--number: expected one argument"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse(Some, arguments, "some")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--json=5", "here"], "--json takes no value, got '5'; write --json or --no-json"),
        (["here", "--no-json=1"], "--no-json takes no value, got '1'; write --json or --no-json"),
        (["--mixed=", "here"], "--mixed takes no value, got ''; write --mixed or --no-mixed"),
        (["here", "--json", "5"], "--json takes no value, got '5'; write --json or --no-json"),
        (["--no-mixed", "False", "here"], "--no-mixed takes no value, got 'False'; write --mixed or --no-mixed"),
    ],
)
def test_a_switch_that_is_given_a_value_is_named(arguments: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(named)}$"):
        parse(Some, arguments, "some")


def test_a_word_after_a_switch_that_belongs_elsewhere_is_not_called_its_value() -> None:
    assert parse(Some, ["--json", "here"], "some").place == Path("here")
    with pytest.raises(ValueError, match=r"^tra some does not expect 'word' here"):
        parse(Some, ["--json", "here", "word"], "some")


@pytest.mark.parametrize("command", ["evaluate", "inspect", "export", "generate"])
def test_what_must_be_given_is_named(command: str, capsys: Captured) -> None:
    assert fails([command], capsys) == f"RUN must be given; see tra {command} --help"
    assert fails(["generate", "nowhere"], capsys) == "--prompt must be given; see tra generate --help"
    assert fails(["reproduce"], capsys) == "NAME|FILE must be given; see tra reproduce --help"


@pytest.mark.parametrize("number", ["-5", "-.5", "-1e-3", "-2E+1"])
def test_a_negative_number_is_a_value_and_no_option(number: str) -> None:
    assert parse(Some, ["--rate", number, "here"], "some") == Some(place=Path("here"), all={"rate": float(number)})


def test_text_that_begins_with_hyphens_is_left_as_it_is() -> None:
    assert parse(Some, ["--names", "--a_b is a name"], "some").names == ("--a_b is a name",)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([""], "PLACE must be a path or None, got ''"),  # an unset variable of the shell, not the current folder
        (["--model.optios", "a=1"], "--model.optios is no option of tra some; did you mean --options?"),
    ],
)
def test_what_argparse_would_let_pass_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(Some, arguments, "some")


def test_two_hyphens_are_no_number() -> None:
    """Older versions of argparse drop the value."""
    with pytest.raises(ValueError, match=r"^--number must "):
        parse(Some, ["--number=--"], "some")

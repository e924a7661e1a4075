"""Options as every command has them: the fields of a dataclass, with one clear line for what is wrong.

A field's metadata says what is special about it: ``{"positional": "RUN"}`` has no name on the command line,
``{"option": "output"}`` another one, ``{"hidden": True}`` none at all, and ``{"flat": Recipe}`` holds the options of
another dataclass: an object of it, or a dict of those that were given.
"""

import argparse
import ast
import difflib
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from tra import plugins
from tra.progress import shown
from tra.signatures import format_value, mismatch

Options = TypeVar("Options")

MOST_THREADS = 4096

ALIASES = {"--model.options": "--model.attention-options"}

TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")
"""What a switch may have been given as its value."""

OPTION_NAME = re.compile(r"--[\w.-]+")
NEGATIVE_NUMBER = re.compile(r"-[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    plugin: tuple[str, ...] = ()
    """Modules, or files ending in .py, with your own mechanisms, tasks and recipes. Installed plug-ins load
    without it."""

    threads: int | None = None
    """Threads in all, divided among parallel runs; one per core by default. On a busy machine fewer are faster."""

    @property
    def plugin_words(self) -> list[str]:
        """The plug-ins as they must be given again."""
        return ["--plugin", *self.plugin] if self.plugin else []


@dataclass(frozen=True)
class Argument:
    """A field as the command line has it."""

    name: str
    """With hyphens, or how one that is given by its place is shown."""
    key: str
    """The field, after those of the dataclasses around it: ``model.width``."""
    kind: Any
    owner: type
    entry: "Field[Any]"

    @property
    def is_positional(self) -> bool:
        return "positional" in self.entry.metadata

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) in (tuple, dict)

    @property
    def names(self) -> list[str]:
        before, dot, last = self.name[2:].rpartition(".")
        return [self.name, f"--{before}{dot}no-{last}"] if self.kind is bool else [self.name]

    def converted(self, given: Any) -> Any:
        """The value of the field for the words that were given, or for a switch."""
        try:
            if get_origin(self.kind) is dict:
                return settings(given)
            if self.is_list:
                return tuple(_converted(text, get_args(self.kind)[0]) for text in listed(given))
            if given == []:  # what argparse makes of --name=--
                raise ValueError("must have a value other than --")
            return given if isinstance(given, bool) else _converted(given, self.kind)
        except ValueError as error:
            raise ValueError(f"{self.name} {error}") from None


def arguments_of(kind: Any, prefix: str = "") -> list[Argument]:
    """The options of a dataclass; those of one within it begin with the name of its field."""
    found: list[Argument] = []
    hints = get_type_hints(kind)
    for entry in fields(kind):
        if "flat" in entry.metadata:
            found += arguments_of(entry.metadata["flat"])
        elif is_dataclass(hints[entry.name]):
            found += arguments_of(hints[entry.name], f"{prefix}{entry.name}.")
        elif "hidden" not in entry.metadata:
            name = f"--{prefix}{entry.metadata.get('option', entry.name)}".replace("_", "-")
            shown_as = entry.metadata.get("positional", name)
            found.append(Argument(shown_as, prefix + entry.name, hints[entry.name], kind, entry))
    return found


def parse(
    kind: type[Options],
    arguments: Sequence[str],
    command: str,
    help_of: Callable[[Mapping[str, Any]], str] | None = None,
) -> Options:
    """A command's options, or a ValueError with one line that says what is wrong and what may have been meant.

    Plug-ins are loaded on the way. With --help, what ``help_of`` makes of the other values is printed, by default what
    the dataclass and its fields say.
    """
    given = _given(kind, arguments, command)
    load_plugins(given.get("plugin", ()))
    if given.pop("help", False):
        print(help_text(kind, command) if help_of is None else help_of(given), end="")
        raise SystemExit(0)
    if "threads" in given:
        _set_threads(given["threads"])
    values: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]
        inner = entry.metadata.get("flat")
        if inner is not None:
            own = {option.key: given[option.key] for option in arguments_of(inner) if option.key in given}
            values[entry.name] = own if entry.default_factory is dict else inner(**own)
        elif entry.name in given:
            values[entry.name] = given[entry.name]
        elif entry.default is entry.default_factory is MISSING:
            name = next(option.name for option in arguments_of(kind) if option.key == entry.name)
            raise ValueError(f"{name} must be given; see tra {command} --help")
    return kind(**values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


class _Switch(argparse.Action):
    """--name and --no-name."""

    def __call__(self, _: Any, namespace: Any, __: Any, name: str | None = None) -> None:
        setattr(namespace, self.dest, name == self.option_strings[0])


def _parser(
    options: Sequence[Argument], help_of: Callable[[Argument], str] = str, usage: str = "", text: str = ""
) -> _Parser:
    parser = _Parser(
        usage=usage, description=text, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this")
    for option in options:
        how: dict[str, Any] = {} if option.is_positional else {"dest": option.key}
        if option.kind is bool:
            how |= {"action": _Switch, "nargs": 0}
        else:
            metavar = option.name if option.is_positional else _metavar(option.kind)
            how |= {"metavar": metavar, **({"nargs": "*", "action": "extend"} if option.is_list else {})}
        parser.add_argument(*option.names, help=help_of(option).replace("%", "%%"), **how)
    return parser


def _given(kind: type, arguments: Sequence[str], command: str) -> dict[str, Any]:
    """The values that are given, by the keys of their options."""
    options = arguments_of(kind)
    named = [option for option in options if not option.is_positional]
    by_place = [option for option in options if option.is_positional]
    spelled = _spelled(arguments, named)
    found, words = _parser(named).parse_known_args(spelled)
    given = vars(found)
    given |= {option.key: option.converted(given[option.key]) for option in named if option.key in given}
    for place, word in enumerate(words):
        if word.startswith("-"):
            raise ValueError(_unknown(word, kind, command))
        if place >= len(by_place):
            _refuse_value_of_switch(word, spelled, named)
            raise ValueError(f"tra {command} does not expect {word!r} here; see tra {command} --help")
        given[by_place[place].key] = by_place[place].converted(word)
    return given


def help_text(kind: type, command: str, usual: Any = None) -> str:
    """What --help says: what stands in the dataclass, and defaults; those of options of another dataclass are the
    values of ``usual``, where that is given."""

    def about(option: Argument) -> str:
        if usual is not None and option.owner is not kind:
            default = attrgetter(option.key)(usual)
        else:
            default = option.entry.default if option.entry.default_factory is MISSING else ()
        words = [_documented(option.owner).get(option.entry.name, "")]
        if default not in (MISSING, None, (), {}, ""):
            values = format_settings(default) if isinstance(default, Mapping) else default
            words.append(f"(default: {' '.join(map(str, values)) if option.is_list else format_value(values)})")
        return " ".join(filter(None, words))

    options = sorted(arguments_of(kind), key=lambda option: option.key in Common.__annotations__)  # these at the end
    places = [option.name for option in options if option.is_positional]
    usage = " ".join(["tra", command, *places, "[options]"])
    return _parser(options, about, usage, inspect.getdoc(kind) or "").format_help()


@cache
def _documented(kind: type) -> dict[str, str]:
    """What stands below each field of a dataclass."""
    found = {}
    for part in filter(is_dataclass, reversed(kind.__mro__)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(tree, ast.ClassDef)
        for entry, below in itertools.pairwise(tree.body):
            if isinstance(entry, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(entry.target)] = " ".join(ast.literal_eval(below.value).split())
    return found


def _metavar(kind: Any) -> str:
    """How a value is shown: PATH, INT, or the words that there are."""
    if get_origin(kind) is dict:
        return "NAME=VALUE"
    if get_origin(kind) is tuple:
        return _metavar(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_args(kind):
        return "|".join(_metavar(part) for part in get_args(kind) if part is not NoneType)
    return getattr(kind, "metavar", kind.__name__.upper())


def load_plugins(names: Sequence[str]) -> None:
    """Load what --plugin names; a module may lie in the current folder."""
    if names:
        plugins.add_folder(str(Path.cwd()))
    for name in names:
        try:
            plugins.load(name)
        except ValueError as error:
            swallowed = name != names[0] and not name.endswith(".py")
            raise ValueError(f"{error}; what is no plug-in goes before --plugin" if swallowed else error) from error


def _set_threads(threads: int) -> None:
    if not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be between 1 and {MOST_THREADS:,}, got {threads}")
    import torch

    torch.set_num_threads(threads)


def on_console(quiet: bool = False) -> AbstractContextManager[None]:
    """Show lines and progress, unless the output is for a machine."""
    return nullcontext() if quiet else shown()


def listed(values: Sequence[str]) -> tuple[str, ...]:
    """A list as it may be written everywhere: with spaces or commas between its entries."""
    return tuple(dict.fromkeys(part.strip() for value in values for part in value.split(",") if part.strip()))


def settings(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs, separated by spaces or commas: numbers, true, false and none are what they say, the rest is
    text. What that cannot express is written as one JSON object.

    Example:
        >>> settings(["theta=1e4", "qk_norm=false,scaling=yarn"])
        {'theta': 10000.0, 'qk_norm': False, 'scaling': 'yarn'}
        >>> settings(['{"train": "a, b"}'])
        {'train': 'a, b'}
    """
    if len(texts) == 1 and texts[0].startswith("{"):
        try:
            return json.loads(texts[0])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"must be NAME=VALUE pairs or a JSON object: {error}") from error
    found: dict[str, Any] = {}
    for text in listed(texts):
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"must be NAME=VALUE, got {text!r}")
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text.replace("_", "") if number is int else text)
        except ValueError:
            continue
    return text


def format_settings(values: Mapping[str, Any]) -> list[str]:
    """The opposite of `settings`."""
    return [f"{name}={json.dumps(value) if not isinstance(value, str) else value}" for name, value in values.items()]


def _converted(text: str, kind: Any) -> Any:
    """A word as the first type that an annotation allows."""
    if hasattr(kind, "from_text"):
        return kind.from_text(text)
    for make in (float, int, {"None": None, "True": True, "False": False}.__getitem__, str, _path):
        try:
            value = make(text)
        except (ValueError, KeyError):
            continue
        if mismatch(value, kind) is None:
            return value
    raise ValueError(f"must be {mismatch(text, kind)}")


def _path(text: str) -> Path:
    """An empty one, as of an unset variable of the shell, would mean the current folder."""
    if not text:
        raise ValueError("must not be empty")
    return Path(text)


def _spelled(arguments: Sequence[str], options: Sequence[Argument]) -> list[str]:
    """The arguments with the names of options as argparse knows them.

    A number such as -1e-3 is joined to the option before it, since argparse takes it for an option.
    """
    takes_one = {option.name for option in options if option.kind is not bool and not option.is_list}
    switches = _switches(options)
    found: list[str] = []
    for argument in map(_without_alias, arguments):
        name, equals, value = argument.partition("=")
        if equals and name in switches:
            raise ValueError(_takes_no_value(switches[name], name, value))
        if found and found[-1] in takes_one and NEGATIVE_NUMBER.fullmatch(argument):
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def _switches(options: Sequence[Argument]) -> dict[str, Argument]:
    return {name: option for option in options if option.kind is bool for name in option.names}


def _takes_no_value(option: Argument, name: str, value: str) -> str:
    return f"{name} takes no value, got {value!r}; write {' or '.join(option.names)}"


def _refuse_value_of_switch(surplus: str, spelled: Sequence[str], options: Sequence[Argument]) -> None:
    """Raise the error that names the switch, where one word is too many and a switch was given a value."""
    switches = _switches(options)
    for name, value in itertools.pairwise(spelled):
        if name in switches and (value == surplus or value.lower() in TRUTHS):
            raise ValueError(_takes_no_value(switches[name], name, value))


def _without_alias(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if not OPTION_NAME.fullmatch(name):  # a text that begins with hyphens
        return argument
    name = name.replace("_", "-")
    return ALIASES.get(name, name) + equals + value


def _unknown(argument: str, kind: type, command: str) -> str:
    name = argument.partition("=")[0]
    known = [name for option in arguments_of(kind) if not option.is_positional for name in option.names]
    known += [alias for alias, option in ALIASES.items() if option in known]
    near = _abbreviated(name, known) or difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; see tra {command} --help"
    return f"{name} is no option of tra {command}{hint}"


def _abbreviated(name: str, known: Sequence[str]) -> list[str]:
    """Options whose words begin with the letters of a short name: --lr for --learning-rate."""
    letters = name.lstrip("-").lower()
    if len(letters) < 2:
        return []
    return [option for option in known if "".join(word[0] for word in re.findall(r"[a-z]+", option)) == letters]

"""Options as every command has them: parsed by tyro from a dataclass, with one clear line for what is wrong."""

import difflib
import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import tyro

from tra.progress import shown

Options = TypeVar("Options")

MOST_THREADS = 4096

ALIASES = {"--model.options": "--model.attention-options"}


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    plugin: tuple[str, ...] = ()
    """Modules, or files ending in .py, that bring mechanisms, tasks and recipes of one's own; installed ones are found
    without it."""

    threads: int | None = None
    """Threads to compute with, divided among runs that go on at the same time; as many as cores by default. On a busy
    machine fewer are faster."""

    @property
    def plugin_words(self) -> list[str]:
        """The plug-ins as they must be given again."""
        return ["--plugin", *self.plugin] if self.plugin else []


def parse(kind: type[Options], arguments: Sequence[str], command: str, default: Options | None = None) -> Options:
    """A command's options, or a ValueError with one line that says what is wrong and what may have been meant."""
    arguments = [_without_alias(argument) for argument in arguments]
    wrong = io.StringIO()
    try:
        with redirect_stderr(wrong):
            found, unknown = tyro.cli(
                kind,
                args=arguments,
                prog=f"tra {command}",
                default=tyro.MISSING_NONPROP if default is None else default,
                return_unknown_args=True,
                registry=_registry(),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_one_line(wrong.getvalue(), command)) from None
    if unknown:
        raise ValueError(_unknown(unknown[0], kind, command))
    if isinstance(found, Common) and found.threads is not None:
        _set_threads(found.threads)
    return found


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


def given_options(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The options that are given and their values, by their full names; words that belong to none are under "".

    Some must be known before the others can be understood: plug-ins bring names, a mechanism has options.

    Example:
        >>> given_options(["flip-flop", "--model.options", "a=1", "b=2", "--seed=3"])
        {'': ['flip-flop'], '--model.attention-options': ['a=1', 'b=2'], '--seed': ['3']}
    """
    given: dict[str, list[str]] = {"": []}
    name = ""
    for argument in map(_without_alias, arguments):
        if argument.startswith("-"):
            name, equals, value = argument.partition("=")
            given.setdefault(name, [])
            if equals:
                given[name].append(value)
                name = ""
        else:
            given[name].append(argument)
    return given


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


def _registry() -> tyro.constructors.ConstructorRegistry:
    """How values are read that tyro reads in another way, or refuses in words that say less."""
    registry = tyro.constructors.ConstructorRegistry()
    spec = tyro.constructors.PrimitiveConstructorSpec

    @registry.primitive_rule
    def options(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type_origin is not dict and info.type is not dict:
            return None
        return spec("*", "[NAME=VALUE ...]", settings, lambda value: isinstance(value, dict), format_settings)

    @registry.primitive_rule
    def lists(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        of = get_args(info.type)
        if info.type_origin is not tuple or len(of) != 2 or of[1] is not ... or of[0] not in (int, str):
            return None
        one = _whole_number if of[0] is int else str
        return spec(
            "*",
            "[INT ...]" if of[0] is int else "[STR ...]",
            lambda texts: tuple(one(text) for text in listed(texts)),
            lambda value: isinstance(value, tuple),
            lambda values: [str(value) for value in values],
        )

    @registry.primitive_rule
    def with_a_text(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        """Of types that say themselves how they are written: a shard, 2/3."""
        kind: Any = info.type
        if not hasattr(kind, "from_text"):
            return None
        return spec(1, "I/N", lambda texts: kind.from_text(texts[0]), lambda value: isinstance(value, kind), _words)

    @registry.primitive_rule
    def numbers(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type not in (int, float):
            return None
        is_int = info.type is int
        return spec(
            1,
            "INT" if is_int else "FLOAT",
            lambda texts: _whole_number(texts[0]) if is_int else _number(texts[0]),
            lambda value: isinstance(value, int) or (not is_int and isinstance(value, float)),
            _words,
        )

    return registry


def _words(value: object) -> list[str]:
    return [str(value)]


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


def _without_alias(argument: str) -> str:
    name, equals, value = argument.partition("=")
    name = name.replace("_", "-") if name.startswith("--") else name
    return ALIASES.get(name, name) + equals + value


def _one_line(box: str, command: str) -> str:
    """What tyro says in a box, without the box and without its hints."""
    said: list[str] | None = None
    for line in box.splitlines():
        text = line.strip().strip("│").strip()
        if re.match(r"[╭╰─]|-{3,}$", text):  # a console that cannot show the box has lines of hyphens
            if said is not None:
                break
            said = []
        elif said is not None and text:
            said.append(text)
    text = " ".join(said or []) or "the arguments could not be understood"
    if missing := re.match(r"Missing from .*?: (\S+)", text):
        return f"{missing[1]} must be given; see tra {command} --help"
    if choice := re.match(r"invalid choice (\S+) for argument '(\S+)'. Expected one of \((.*?),?\)", text):
        return f"{choice[2]} must be one of {choice[3]}, got {choice[1]}"
    text = re.sub(r"^Error parsing (--\S+): (no type matching .*)?must be", r"\1 must be", text)
    return re.sub(r"^Error parsing (recipe|request)[.\w]*: ", "", text)  # what these say themselves names the argument


def _unknown(argument: str, kind: type, command: str) -> str:
    if not argument.startswith("-"):
        return f"tra {command} does not expect {argument!r} here; see tra {command} --help"
    name = argument.partition("=")[0]
    known = option_names(kind)
    near = _abbreviated(name, known) or difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; see tra {command} --help"
    return f"{name} is no option of tra {command}{hint}"


def option_names(kind: Any, prefix: str = "") -> list[str]:
    """The options that tyro makes of a dataclass."""
    found: list[str] = []
    hints = get_type_hints(kind, include_extras=True)
    for entry in fields(kind):
        hint = hints[entry.name]
        marks = getattr(hint, "__metadata__", ())
        if tyro.conf.Suppress in marks:
            continue
        bare = get_args(hint)[0] if get_args(hint) and hasattr(hint, "__metadata__") else hint
        if is_dataclass(bare):
            flat = any(getattr(mark, "name", None) == "" for mark in marks)
            found += option_names(bare, prefix if flat else f"{prefix}{entry.name}.")
        else:
            named = [mark.name for mark in marks if getattr(mark, "name", None)]
            name = (named or [entry.name])[0].replace("_", "-")
            found += [f"--{prefix}{name}", f"--{prefix}no-{name}"] if bare is bool else [f"--{prefix}{name}"]
    return [*found, *(alias for alias, name in ALIASES.items() if name in found)]


def _abbreviated(name: str, known: Sequence[str]) -> list[str]:
    """Options whose words begin with the letters of a short name: --lr for --learning-rate."""
    letters = name.lstrip("-").lower()
    if len(letters) < 2:
        return []
    return [option for option in known if "".join(word[0] for word in re.findall(r"[a-z]+", option)) == letters]

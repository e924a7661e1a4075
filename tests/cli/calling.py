"""Calling a command as the entry point does."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tra import plugins
from tra.cli import main

Captured = pytest.CaptureFixture[str]


def fails(arguments: list[str], capsys: Captured, code: int = 2) -> str:
    """The one line that a command says when it fails."""
    capsys.readouterr()
    assert main(arguments) == code
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if not line.startswith("tra: warning: ")]
    assert line.startswith("tra: error: ")
    assert shown.out == ""
    return line.removeprefix("tra: error: ")


def shows(arguments: list[str], capsys: Captured) -> str:
    """What a command prints when all goes well."""
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out


def help_of(arguments: list[str], capsys: Captured) -> str:
    """What --help says, its boxes taken off."""
    try:
        assert main([*arguments, "--help"]) == 0
    except SystemExit as stop:
        assert stop.code in (0, None)
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def json_of(arguments: list[str], capsys: Captured) -> Any:
    return json.loads(shows([*arguments, "--json"], capsys))


@contextmanager
def without_plugins() -> Iterator[None]:
    """No plug-in is loaded when the block begins, and those loaded in it are forgotten when it ends."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_loaded", "_paths", "_versions"):
            patch.setattr(plugins, name, {})
        patch.setattr(plugins, "_folders", [])
        patch.setattr(plugins, "_installed_done", False)
        patch.setattr(sys, "path", list(sys.path))
        yield
    for name in set(sys.modules) - before:
        if name.startswith("tra_plugin_"):
            del sys.modules[name]

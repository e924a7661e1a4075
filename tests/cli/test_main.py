"""What all commands share: help, plug-ins, and one line for whatever goes wrong."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.calling import Captured, fails, help_of, shows
from tra import __version__, plugins
from tra.cli import COMMANDS, main

SOME = {
    "demo": [],
    "train": ["flip-flop-small"],
    "evaluate": ["nowhere"],
    "reproduce": ["table1"],
    "inspect": ["nowhere"],
    "adopt": ["nowhere", "new"],
    "export": ["nowhere", "new"],
    "generate": ["nowhere", "--prompt", "The"],
    "bench": [],
    "doctor": [],
    "list": [],
}
"""Of every command, arguments that it understands."""


def test_help_names_every_command(capsys: Captured) -> None:
    assert shows([], capsys) == shows(["--help"], capsys) == shows(["-h"], capsys)
    shown = shows([], capsys)
    assert all(f"\n  {name} " in shown for name in SOME)
    assert set(SOME) == set(COMMANDS)


def test_every_command_is_a_file_of_its_own() -> None:
    folder = Path(sys.modules["tra.cli"].__file__ or "").parent
    assert set(COMMANDS) <= {file.stem for file in folder.glob("*.py")}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_says_what_it_does_and_names_plugin(command: str, capsys: Captured) -> None:
    shown = help_of([command], capsys)
    assert shown.startswith(f"usage: tra {command}")
    assert "--plugin" in shown
    assert len(shown) > 400


@pytest.mark.parametrize("command", [[name] for name in COMMANDS if name != "train"] + [["train", "flip-flop-small"]])
def test_help_explains_every_option(command: list[str], capsys: Captured) -> None:
    """Name and value, two spaces or a new line, and then a text."""
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    entries = [re.split(r"\s{2,}", entry.strip(), maxsplit=1) for entry in capsys.readouterr().out.split("\n  -")[1:]]
    assert len(entries) > 3
    bare = {name.split()[0].removeprefix("-") for name, *text in entries if not text or text[0].startswith("(default")}
    # What a recipe says in words that explain themselves.
    known = "seed steps learning-rate weight-decay log-every checkpoint-every keep-checkpoints model.layers model.heads"
    assert bare <= ({*known.split(), "model.width"} if len(command) > 1 else set())


def test_the_version_is_the_packages(capsys: Captured) -> None:
    assert shows(["--version"], capsys) == f"tra {__version__}\n"


def test_a_misspelt_command_gets_a_suggestion(capsys: Captured) -> None:
    error = fails(["trian"], capsys)
    assert error.startswith("command must be one of adopt, bench, ")
    assert error.endswith("got 'trian'; did you mean 'train'?")


@pytest.mark.parametrize("command", SOME)
def test_every_command_loads_plug_ins_first(command: str, capsys: Captured) -> None:
    error = fails([command, *SOME[command], "--plugin", "no_such_module"], capsys)
    assert error.startswith("plugin must be the name of a module or a path ending in .py, got 'no_such_module'")


@pytest.mark.parametrize("command", SOME)
def test_every_command_refuses_an_option_that_it_does_not_have(command: str, capsys: Captured) -> None:
    error = fails([command, *SOME[command], "--plugni", "x"], capsys)
    assert "--plugni is no option of tra " in error
    assert error.endswith("; did you mean --plugin?")


def test_what_plugin_takes_by_mistake_is_said(capsys: Captured) -> None:
    error = fails(["evaluate", "--plugin", "json", "runs/mine"], capsys)
    assert "got 'runs/mine'" in error
    assert error.endswith("; what is no plug-in goes before --plugin")


@pytest.mark.parametrize("words", [["json", "csv"], ["json,csv"], ["json,", "csv"]])
def test_plug_ins_are_a_list_like_any_other(words: list[str]) -> None:
    assert main(["evaluate", "nowhere", "--plugin", *words]) == 2
    assert list(plugins.loaded()) == ["json", "csv"]


def test_a_file_where_a_folder_should_be_is_one_line(tmp_path: Path, finished_run: Path, capsys: Captured) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for command in ("evaluate", "inspect"):
        assert fails([command, str(file)], capsys) == f"run must be a folder that holds recipe.json, got {file}"
    assert fails(["train", "--resume", str(file)], capsys) == f"run must be a folder that holds recipe.json, got {file}"
    assert "recipe.json (a run) or config.json (exported)" in fails(["generate", str(file), "--prompt", "a"], capsys)
    assert fails(["export", str(finished_run), str(file)], capsys) == f"folder must not exist yet, got {file}"
    assert str(file) in fails(["export", str(finished_run), str(file / "new")], capsys, code=1)
    assert str(file) in fails(["inspect", str(finished_run), "--output", str(file)], capsys, code=1)
    error = fails(["train", "flip-flop-small", "--steps", "1", "--output", str(file)], capsys)
    assert error == f"folder must be a folder, but {file} is a file"
    assert (
        fails(["reproduce", "demo", "--output", str(file)], capsys) == f"output must be a folder, but {file} is a file"
    )
    assert file.read_text() == "mine"


def test_arguments_that_are_no_utf8_are_one_line(capsys: Captured) -> None:
    for arguments in (["\udcff"], ["evaluate", "runs/\udcff"], ["train", "flip-flop-small", "--name", "\udcff"]):
        assert fails(arguments, capsys).startswith("arguments must be valid UTF-8, got '")


@pytest.mark.parametrize(
    "arguments",
    [["--model.width", "1048576", "--model.heads", "4"], ["--batch", "99999999"]],
    ids=["width", "batch"],
)
def test_what_has_no_room_in_memory_is_refused_before_it_is_made(
    arguments: list[str], tmp_path: Path, capsys: Captured
) -> None:
    error = fails(["train", "flip-flop-small", "--output", str(tmp_path / "run"), *arguments], capsys)
    assert re.search(r"must fit into memory: it takes at least [\d.e+]+ GB, and this machine has [\d.]+$", error)
    assert not (tmp_path / "run").exists()


def test_lack_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def take_all(_: list[str]) -> int:
        torch.empty(1 << 60)
        return 0

    monkeypatch.setattr("tra.cli.list.run", take_all)
    assert fails(["list"], capsys, code=1).startswith("out of memory: ")

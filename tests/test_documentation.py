"""Examples in README and docs run as they stand, and the commands they name exist.

What stands behind the language of a block of code says what is done with it:

| | |
|---|---|
| `python` | a program, run by itself in an empty folder |
| `bash` | commands that are not run; that they and their options exist is checked |
| `python file=NAME` | a part of that file, in a folder that the page has for itself |
| `python run`, `bash run` | a program, or commands, run in that folder in their order |
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks, fences
from tra.cli import COMMANDS
from tra.cli.parsing import parse

EXAMPLES = [page for page in PAGES if blocks(page, "python")]
RUNNER = """
import os, runpy, sys
for script in sys.argv[1:]:
    os.chdir(os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
"""
"""Programs one after the other, each in its own folder: most of the time goes into importing PyTorch."""
WALKS = [page for page in PAGES if any(fence.rest for fence in fences(page))]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, tmp_path: Path) -> None:
    scripts = [tmp_path / str(number) / "example.py" for number in range(len(blocks(page, "python")))]
    for script, code in zip(scripts, blocks(page, "python"), strict=True):
        script.parent.mkdir()
        script.write_text(code)
    run([sys.executable, "-c", RUNNER, *map(str, scripts)], tmp_path)


def run(command: list[str], folder: Path) -> None:
    # What is so small is slower with more threads. Nobody's cache is written to.
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "TRA_CACHE": str(folder / "texts")}
    process = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("page", WALKS, ids=lambda page: page.name)
def test_a_page_that_builds_something_works_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    for language, rest, code in fences(page):
        if rest.startswith("file="):
            with (tmp_path / rest.removeprefix("file=")).open("a") as file:
                file.write(code)
        elif rest:
            assert rest == "run", f"{page.name}: {rest!r} behind {language}"
            for command in [["-c", code]] if language == "python" else map(arguments_of, code.splitlines()):
                run([sys.executable, *command], tmp_path)


def arguments_of(line: str) -> list[str]:
    """Of Python, for a line that calls `tra`."""
    command, *words = shlex.split(line, comments=True)
    assert command == "tra"
    return ["-m", "tra", *words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_examples_are_commands_with_options_that_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert f"\n{words[1]}:" in makefile
        if "tra" in words:
            command, *rest = words[words.index("tra") + 1 :]
            assert command in COMMANDS
            module = importlib.import_module(f"tra.cli.{command}")
            parse(getattr(module, command.capitalize()), rest, command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_shows_the_two_commands() -> None:
    assert {"make demo", "make test"} <= {
        line.split("#")[0].strip() for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()
    }


def test_the_journeys_go_through_files_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    journeys = page[page.index("## Three journeys") : page.index("## To add a mechanism")]
    drawn = "\n".join(line for line in journeys.splitlines() if line.startswith("    "))
    named = set(re.findall(r"[\w/]+\.(?:py|cpp|h)\b", drawn)) - {"my_experiment.py"}
    assert {"cli/train.py", "op.cpp", "grid.py"} <= named
    for name in named:
        assert list((ROOT / "tra").rglob(name)), name

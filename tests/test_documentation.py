"""Examples in README and docs run as they stand, and the commands they name exist."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tra.cli import COMMANDS
from tra.cli.options import parse, value_of
from tra.recipes import build_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


EXAMPLES = [(page, code) for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize("page, code", EXAMPLES, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(EXAMPLES)])
def test_python_example_runs(page: Path, code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    process = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


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
            if command == "train" and "--resume" in rest:
                parse(module.Resume, rest, command)
            elif command == "train":
                recipe = build_recipe(rest[0], value_of(rest, "--model.attention"))
                parse(module.Train, rest[1:], command, module.Train(recipe=recipe))
            else:
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

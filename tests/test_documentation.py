"""Examples in README and docs run as they stand, and the commands they name exist."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


EXAMPLES = [(page, code) for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize("page, code", EXAMPLES, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(EXAMPLES)])
def test_python_example_runs(page: Path, code: str, tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_examples_are_commands_with_options_that_exist(page: Path) -> None:
    from tra import cli
    from tra.recipes import RECIPES

    makefile = (ROOT / "Makefile").read_text()
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert f"\n{words[1]}:" in makefile
        if "tra" in words:
            command, *rest = words[words.index("tra") + 1 :]
            assert command in cli.DESCRIPTIONS
            if command == "train" and "--resume" in rest:
                tyro.cli(cli.Resume, args=rest)
            elif command == "train":
                tyro.cli(cli.Train, args=rest[1:], default=cli.Train(RECIPES[rest[0]]()))
            else:
                tyro.cli(getattr(cli, command.capitalize()), args=rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_shows_the_two_commands() -> None:
    assert {"make demo", "make test"} <= {
        line.split("#")[0].strip() for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()
    }


def test_learning_rates_of_the_small_table_are_those_that_were_measured_best() -> None:
    from tra.recipes import table1
    from tra.reproduce import best_rates, tuning_losses

    stored = json.loads((ROOT / "docs" / "results" / "tuning" / "results.json").read_text())
    trained = {rate: recipe["length"] for rate, recipe in stored["recipes"].items()}
    best = best_rates(tuning_losses(stored["results"], trained))
    assert {name: float(rate) for name, rate in best.items()} == table1.LEARNING_RATES

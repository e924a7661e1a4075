"""`tra list`."""

import json
import subprocess
import sys

import pytest

from tests.cli.calling import Captured, json_of, shows
from tra.attention import MECHANISMS
from tra.cli.list import STORED, everything
from tra.experiments import BUILT_IN
from tra.recipes import RECIPES
from tra.tasks import TASKS


def test_everything_that_there_is_to_name(capsys: Captured) -> None:
    """With options and their defaults, and what implementations refuse."""
    listed = json_of(["list"], capsys)
    assert set(listed["recipes"]) >= set(RECIPES)
    assert set(listed["attention"]) >= set(MECHANISMS)
    assert set(listed["tasks"]) >= set(TASKS)
    assert set(listed["experiments"]) == set(BUILT_IN)
    assert set(listed["sizes"]) == {"mini", "medium"}
    assert all(text for entries in listed.values() for text in entries.values())
    assert "theta=500000" in listed["attention"]["rope"]
    assert all("qk_norm=True" in text for text in listed["attention"].values())
    assert listed["tasks"]["copy_unique"].endswith("Options: alphabet=100, mixed=True.")
    assert "tokenizer=gpt2" in listed["tasks"]["text"]
    implementations = json_of(["list", "--implementations"], capsys)["implementations"]
    assert {"reference", "cpu"} <= set(implementations)
    assert "refuse" in implementations["cpu"]


def test_what_is_stored_is_what_there_is() -> None:
    """`python -m tra.cli.list` writes it."""
    assert json.loads(STORED.read_text()) == everything()


@pytest.mark.parametrize("arguments", [["--help"], ["list"]])
def test_help_and_list_answer_without_torch(arguments: list[str]) -> None:
    """Which takes a second or two to import, and nothing else here does."""
    program = f"import sys; from tra.cli import main; main({arguments!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "list" in done.stdout or "flip-flop-small" in done.stdout


def test_tables_for_people_show_the_same(capsys: Captured) -> None:
    shown = shows(["list"], capsys)
    for name in ("flip-flop-small", "stick-breaking", "copy_repeat", "table1", "medium"):
        assert name in shown

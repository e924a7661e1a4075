"""Argument lists over the options that every command has: a code, and one line if it is not 0."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.calling import without_plugins
from tests.cli.conftest import tiny
from tests.fuzz.calling import ends_well
from tests.fuzz.strategies import TRIED, attack, command_lines
from tra.cli.bench import Bench
from tra.cli.demo import Demo
from tra.cli.evaluate import Evaluate
from tra.cli.export import Export
from tra.cli.generate import Generate
from tra.cli.inspect import Inspect
from tra.cli.list import List
from tra.cli.reproduce import Reproduce
from tra.cli.train import Train
from tra.recipes import RECIPES

KINDS: dict[str, tuple[type, list[str]]] = {
    "train": (Train, ["train", "flip-flop-small"]),
    "resume": (Train, ["train", "--resume", "RUN"]),
    "evaluate": (Evaluate, ["evaluate", "RUN", "--examples", "1"]),
    "inspect": (Inspect, ["inspect", "RUN"]),
    "export": (Export, ["export", "RUN"]),
    "generate": (Generate, ["generate", "MODEL", "--prompt", "The", "--tokens", "2"]),
    "bench": (Bench, ["bench"]),
    "demo": (Demo, ["demo"]),
    "reproduce": (Reproduce, ["reproduce", "table1"]),
    "list": (List, ["list"]),
}


@pytest.fixture(autouse=True, scope="module")
def _without_the_work(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What takes minutes is left out: the arguments have been understood when it would begin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "flip-flop-small", tiny)
        patch.setattr("tra.runs.train", lambda *_, **__: None)
        patch.setattr("tra.bench.run_benchmarks", lambda *_: {})
        for work in ("perform", "plan"):
            patch.setattr(f"tra.experiments.Experiment.{work}", _performed)
        patch.chdir(tmp_path_factory.mktemp("lines"))
        yield


def _performed(*_: Any, **__: Any) -> Any:
    raise ValueError("understood")


@pytest.mark.parametrize("command", KINDS)
def test_any_arguments_end_with_a_code_and_one_line(command: str, finished_run: Path, exported: Path) -> None:
    kind, first = KINDS[command]
    places = {"RUN": str(finished_run), "MODEL": str(exported)}

    @attack(25)
    @given(command_lines(kind, [places.get(word, word) for word in first]), st.none())
    def attacked(arguments: list[str], _: None) -> None:
        TRIED["command lines"] += 1
        with without_plugins():
            ends_well(arguments)

    attacked()

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

import tra.experiments
from tests.text.reading import prose, write_folder
from tra import plugins
from tra.experiments.cells import Cell
from tra.experiments.local_jobs import run_cell

REPRODUCE = importlib.import_module("tra.experiments.perform")


@pytest.fixture(autouse=True)
def _own_files_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file of one's own that a test loads is a plug-in of that test alone."""
    for name in ("_loaded", "_paths", "_versions"):
        monkeypatch.setattr(plugins, name, dict(getattr(plugins, name)))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("tra_plugin_"):
            del sys.modules[name]


@pytest.fixture
def two_columns(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name by which a command finds that experiment."""
    monkeypatch.setitem(tra.experiments.BUILT_IN, "two", "tests.experiments.small:TWO_COLUMNS")
    return "two"


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> list[list[Cell]]:
    """Run in this process, as processes of their own take seconds to start; gives what was to be run."""
    asked: list[list[Cell]] = []

    def run_all(cells: Sequence[Cell], jobs: int) -> None:
        asked.append(list(cells))
        for cell in cells:
            run_cell(cell)

    monkeypatch.setattr(REPRODUCE, "run_all", run_all)
    return asked


@pytest.fixture
def small_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the smoke scale of figure2 reads, in a few kilobytes."""
    return write_small_texts(tmp_path, monkeypatch)


def write_small_texts(place: Path, patch: pytest.MonkeyPatch) -> Path:
    write_folder(place / "data" / "wikitext-2", prose(1, 800))
    write_folder(place / "data" / "wikitext-103", "", prose(2, 300))
    patch.setenv("TRA_DATA", str(place / "data"))
    patch.setenv("TRA_CACHE", str(place / "cache"))
    return place / "data"


@pytest.fixture(autouse=True)
def _no_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of attention take a second each, and a report that is kept up to date draws from the generator that runs in
    this process draw from: both are made where reports are tested and nowhere else."""
    if not request.module.__name__.endswith("test_report"):
        monkeypatch.setattr(REPRODUCE, "write_explorers", lambda cells: None)
        monkeypatch.setattr(REPRODUCE, "live_report", lambda *_: nullcontext())

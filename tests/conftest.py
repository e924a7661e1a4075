import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from tests.language_run import train_on_text

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: with several threads each they would wait for one another most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def language_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a finished run on text."""
    root = tmp_path_factory.mktemp("language")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRA_CACHE", str(root / "cache"))
        patch.delenv("TRA_DATA", raising=False)
        yield train_on_text(root)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved to files, in whatever formats; not those that a page holds."""
    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *arguments: Any, **options: Any) -> None:
        if figure not in figures and not isinstance(arguments[0], io.StringIO):  # a page's text
            figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures

from pathlib import Path

import pytest

from tests.runs.tiny import TINY, begin, finish


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY from beginning to end in one process. Not to be written to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    begin(TINY, folder)
    finish(folder)
    return folder

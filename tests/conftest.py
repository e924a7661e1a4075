from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.language_run import train_on_text


@pytest.fixture(scope="session")
def language_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a finished run on text."""
    root = tmp_path_factory.mktemp("language")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRA_CACHE", str(root / "cache"))
        patch.delenv("TRA_DATA", raising=False)
        yield train_on_text(root)

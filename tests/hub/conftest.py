from pathlib import Path

import pytest

from tra.hub.export import export


@pytest.fixture(scope="session")
def exported(language_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text as a folder for transformers, which no test may change."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(language_run, folder)
    return folder

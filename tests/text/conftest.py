from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tokenizers and tokens go to a folder of the test's own, and names are not looked for anywhere else."""
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRA_DATA", raising=False)
    return tmp_path / "cache"

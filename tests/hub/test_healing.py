"""The tables of docs/adopt.md are those of the stored results."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_on_adopting_shows_what_is_stored() -> None:
    healing = runpy.run_path(str(ROOT / "benchmarks" / "healing.py"))
    rows = json.loads((ROOT / "docs" / "results" / "healing" / "results.json").read_text())["results"]
    reported = [row for row in rows if row["setting"] in healing["SETTINGS"]]
    choices = [row for row in rows if row["setting"] in healing["CHOICES"]]
    page = (ROOT / "docs" / "adopt.md").read_text()
    assert len(reported) == 8 * (3 * 3 + 1)
    assert len(choices) == len(healing["CHOICES"])
    assert healing["table"](reported) in page
    assert healing["differences"](reported, healing["WINDOWED"]) in page
    assert healing["table"](choices) in page

"""What is measured against what."""

import json
from pathlib import Path

from tra.bench.cases import Row, cases

STORED = Path(__file__).parents[2] / "docs" / "results" / "bench" / "bench.json"


def test_the_cases_are_those_of_the_stored_results() -> None:
    stored = [
        (row["what"], row["shape"], row["against"], row["goal"]) for row in json.loads(STORED.read_text())["rows"]
    ]
    found = [
        (case.what, case.shape, against, case.goal if place == 0 else None)
        for case in cases()
        for place, against in enumerate(case.others)
    ]
    assert found == stored


def test_a_row_says_what_was_measured_and_what_is_wanted() -> None:
    row = Row("forward, every key", "8x4x512", "SDPA", 1.5, 2.0, goal=1.0)
    assert row.ratio == 0.75
    said = " ".join(str(row).split())
    assert said == "forward, every key 8x4x512 1.500 ms SDPA 2.000 ms 0.75x (goal 1)"
    assert "goal" not in str(Row("forward, every key", "8x4x512", "paper, eager", 1.5, 2.0, goal=None))

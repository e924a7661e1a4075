"""The scripts that measure what the docs quote."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "demo_seeds.py"


def test_seed_table_counts_seeds_without_a_single_error() -> None:
    def seed(tra: float, rope: float) -> dict:
        return {
            "runs": {
                name: {"results": [{"set": "iid", "length": length, "exact_match": value} for length in (64, 256)]}
                for name, value in (("tra", tra), ("rope", rope))
            }
        }

    table = runpy.run_path(str(SCRIPT))["table"]
    lines = table([seed(1.0, 0.5), seed(1.0, 1.0), seed(0.4, 0.0)]).splitlines()
    assert lines[0] == "| attention | set | 64 | 256 |"
    assert lines[2] == "| tra | iid | 0.800 (0.400) | 0.800 (0.400) |"
    assert lines[3] == "| rope | iid | 0.500 (0.000) | 0.500 (0.000) |"
    assert lines[-2:] == [
        "tra: 2 of 3 seeds score 1.000 in every cell.",
        "rope: 1 of 3 seeds score 1.000 in every cell.",
    ]

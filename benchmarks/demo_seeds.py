"""`tra demo` over several seeds: in how many does TRA answer everything, and what is RoPE's collapse?

    python benchmarks/demo_seeds.py --seeds 10 --output docs/results/demo

Finished seeds are not run again; processes may share the work with --shard, and the last one writes the results:
`seeds.json`, and `seeds.md` with mean and least exact match over the seeds.
"""

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console

from tra.demo import demonstrate
from tra.files import write_whole
from tra.report import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--shard", default="0/1", help="i/n: run only every n-th seed, beginning with the i-th")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/demo-seeds"), help="folder of the runs themselves")
    options = parser.parse_args()
    first, every = map(int, options.shard.split("/"))
    stored = [options.work / str(seed) / "results.json" for seed in range(options.seeds)]
    for seed in range(first, options.seeds, every):
        if not stored[seed].exists():
            demonstrate(stored[seed].parent, seed, ("tra", "rope"), Console(soft_wrap=True))
    if not all(path.exists() for path in stored):
        return
    seeds = [json.loads(path.read_text()) for path in stored]
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "seeds.json", seeds)
    write_whole(options.output / "seeds.md", table(seeds))
    print((options.output / "seeds.md").read_text())


def table(seeds: list[dict]) -> str:
    cells: dict[tuple[str, str], dict[int, list[float]]] = {}
    for seed in seeds:
        for attention, run in seed["runs"].items():
            for result in run["results"]:
                row = cells.setdefault((attention, result["set"]), {})
                row.setdefault(result["length"], []).append(result["exact_match"])
    lengths = sorted({length for row in cells.values() for length in row})
    lines = [
        "| attention | set | " + " | ".join(f"{length:,}" for length in lengths) + " |",
        "|---|---|" + "---:|" * len(lengths),
    ]
    for (attention, name), row in cells.items():
        shown = (f"{statistics.mean(row[length]):.3f} ({min(row[length]):.3f})" for length in lengths)
        lines.append(f"| {attention} | {name} | {' | '.join(shown)} |")
    perfect = {
        attention: sum(
            all(result["exact_match"] == 1.0 for result in seed["runs"][attention]["results"]) for seed in seeds
        )
        for attention in seeds[0]["runs"]
    }
    lines.append("")
    lines += [f"{name}: {count} of {len(seeds)} seeds score 1.000 in every cell." for name, count in perfect.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""What it is worth to use freed memory again: processor time and page faults of a step, and the most memory held.

    python benchmarks/memory_reuse.py

The small language model of figure 2 on random tokens, one thread, each process with the setting or without it in turn.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch

from tra.bench.workloads import training_step
from tra.model import DecoderConfig
from tra.runs.memory import reuse_memory

WARM_UP = 4


def step_costs(steps: int) -> tuple[float, float, float]:
    """Median milliseconds of processor time and mean page faults of a step, and the most MB held."""
    torch.set_num_threads(1)
    config = DecoderConfig(vocabulary=4096, layers=4, heads=4, width=128, dropout=0.0)
    work = training_step(config, 16, 128, precision="bf16")
    times, faults = [], 0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 1e3 * statistics.median(times[WARM_UP:]), (usage.ru_minflt - faults) / steps, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=16, help="steps that each process measures")
    parser.add_argument("--repeats", type=int, default=3, help="processes with the setting, and without")
    parser.add_argument("--one", choices=["reused", "usual"], help="measure in this process, and print bare numbers")
    arguments = parser.parse_args()
    if arguments.one:
        if arguments.one == "reused":
            reuse_memory()
        print(*step_costs(arguments.steps))
        return
    found: dict[str, list[tuple[float, ...]]] = {"usual": [], "reused": []}
    for _ in range(arguments.repeats):
        for kind, costs in found.items():
            command = [sys.executable, __file__, "--one", kind, "--steps", str(arguments.steps)]
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            costs.append(tuple(map(float, shown.split())))
    medians = {
        kind: [statistics.median(column) for column in zip(*costs, strict=True)] for kind, costs in found.items()
    }
    for kind, (milliseconds, faults, megabytes) in medians.items():
        print(
            f"{kind:>7}: {milliseconds:.0f} ms and {faults:,.0f} page faults a step, at most {megabytes:,.0f} MB held"
        )
    print(f"  ratio: {medians['reused'][0] / medians['usual'][0]:.2f}")


if __name__ == "__main__":
    main()

"""`tra reproduce cost`: time per training step and peak memory of every mechanism, against RoPE."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tra.attention import MECHANISMS
from tra.bench import interleaved, training_step
from tra.figures import cost_by_attention
from tra.files import write_whole
from tra.lookup import lookup
from tra.model import DecoderConfig, sized
from tra.report import environment, write_json


@dataclass(frozen=True)
class Step:
    """What is timed."""

    size: str
    model: DecoderConfig
    batch: int
    length: int
    """Tokens."""
    seconds: float
    """Time for each comparison."""


SCALES: dict[str, tuple[Step, ...]] = {
    "paper": (
        Step("mini", sized("mini", vocabulary=50257), 64, 256, 30.0),
        Step("medium", sized("medium"), 64, 256, 60.0),
    ),
    "small": (Step("mini", sized("mini"), 16, 256, 12.0),),
    "smoke": (Step("smoke", DecoderConfig(vocabulary=8, layers=1, heads=2, width=16), 2, 16, 0.05),),
}
"""The paper's window of 256 and batch of 64; on two cores a smaller batch."""


def measure_cost(
    folder: Path, *, scale: str, attention: Sequence[str], console: Console, command: str
) -> list[dict[str, Any]]:
    """Time each mechanism and RoPE in turn, and write ``cost.json``, ``table.md`` and ``cost.png``."""
    steps = lookup(SCALES, scale, "scale")
    for name in attention:
        lookup(MECHANISMS, name, "attention")
    device = _device()
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for step in steps:
        baseline_memory = peak_megabytes(step, "rope", device)
        for name in attention or MECHANISMS:
            ours, rope = (
                training_step(replace(step.model, attention=kind), step.batch, step.length, device)
                for kind in (name, "rope")
            )
            mine, other = interleaved(ours, rope, step.seconds)
            memory = peak_megabytes(step, name, device)
            rows.append(
                {
                    "size": step.size,
                    "attention": name,
                    "milliseconds": mine * 1e3,
                    "rope_milliseconds": other * 1e3,
                    "time_ratio": mine / other,
                    "megabytes": memory,
                    "rope_megabytes": baseline_memory,
                    "memory_ratio": memory / baseline_memory if memory is not None and baseline_memory else None,
                }
            )
            console.print(_line(rows[-1]), highlight=False)
    content = {
        "command": command,
        "environment": environment(),
        "steps": [asdict(step) for step in steps],
        "results": rows,
    }
    write_json(folder / "results.json", content)
    write_whole(folder / "table.md", cost_table(rows))
    cost_by_attention(rows, folder / "cost.png")
    return rows


def cost_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row per size and mechanism."""
    lines = ["| model | attention | ms per step | time / RoPE | peak MB | memory / RoPE |", "|---|---|" + "---:|" * 4]
    for row in rows:
        memory = "| | |" if row["memory_ratio"] is None else f"| {row['megabytes']:.0f} | {row['memory_ratio']:.2f}x |"
        lines.append(
            f"| {row['size']} | {row['attention']} | {row['milliseconds']:.1f} | {row['time_ratio']:.2f}x {memory}"
        )
    return "\n".join(lines) + "\n"


def peak_megabytes(step: Step, attention: str, device: str) -> float | None:
    """What training steps add to a process that holds model and optimiser; None where it cannot be read."""
    if device == "cpu" and not Path("/proc/self/clear_refs").exists():
        return None
    arguments = {**asdict(step.model), "attention": attention}
    program = "import sys; from tra.cost import print_peak; print_peak(*sys.argv[1:])"
    command = [sys.executable, "-c", program, json.dumps(arguments), str(step.batch), str(step.length), device]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(model: str, batch: str, length: str, device: str) -> None:
    """In a fresh process: one step to allocate what stays, then the peak of three more."""
    work = training_step(DecoderConfig(**json.loads(model)), int(batch), int(length), device)
    work()
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    else:
        torch.accelerator.reset_peak_memory_stats()
    before = _megabytes("VmRSS") if device == "cpu" else torch.accelerator.memory_allocated() / 2**20
    for _ in range(3):
        work()
    after = _megabytes("VmHWM") if device == "cpu" else torch.accelerator.max_memory_allocated() / 2**20
    print(after - before)


def _megabytes(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _device() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def _line(row: dict[str, Any]) -> str:
    memory = "" if row["memory_ratio"] is None else f"   {row['megabytes']:.0f} MB ({row['memory_ratio']:.2f}x)"
    time = f"{row['milliseconds']:>9.1f} ms   {row['time_ratio']:.2f}x RoPE"
    return f"{row['size']:<8}{row['attention']:<24}{time}{memory}"

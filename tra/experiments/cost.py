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
from tra.errors import RunError
from tra.figures import cost_by_attention
from tra.files import write_whole
from tra.lookup import lookup
from tra.memory import added_megabytes, measurable
from tra.model import DecoderConfig, sized
from tra.report import environment, write_json
from tra.runs import best_device


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
        Step("mini", sized("mini", vocabulary=50257, dropout=0.0), 64, 256, 30.0),
        Step("medium", sized("medium", dropout=0.0), 64, 256, 60.0),
    ),
    "small": (Step("mini", sized("mini", dropout=0.0), 16, 256, 6.0),),
    "smoke": (Step("smoke", DecoderConfig(vocabulary=8, layers=1, heads=2, width=16, dropout=0.0), 2, 16, 0.05),),
}
"""The paper's window of 256 and batch of 64; on two cores a smaller batch. Without dropout, with which PyTorch's
attention leaves its fast path on a CPU."""


def measure_cost(
    folder: Path, *, scale: str, attention: Sequence[str], console: Console, command: str
) -> list[dict[str, Any]]:
    """Time each mechanism and RoPE in turn, and write ``results.json``, ``table.md`` and ``cost.png``.

    A mechanism that fails, for want of memory say, is reported in its row and does not stop the others.
    """
    steps = lookup(SCALES, scale, "scale")
    for name in attention:
        lookup(MECHANISMS, name, "attention")
    device = best_device().type
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for step in steps:
        baseline = peak_megabytes(step, "rope", device)
        for name in attention or MECHANISMS:
            row: dict[str, Any] = {"size": step.size, "attention": name}
            try:
                ours, rope = (
                    training_step(replace(step.model, attention=kind), step.batch, step.length, device)
                    for kind in (name, "rope")
                )
                mine, other = interleaved(ours, rope, step.seconds)
                memory = peak_megabytes(step, name, device)
                row |= {
                    "milliseconds": mine * 1e3,
                    "rope_milliseconds": other * 1e3,
                    "time_ratio": mine / other,
                    "megabytes": memory,
                    "rope_megabytes": baseline,
                    "memory_ratio": memory / baseline if memory is not None and baseline else None,
                }
            except (RuntimeError, RunError) as error:
                row |= {"failure": str(error)}
            rows.append(row)
            console.print(_line(row), highlight=False)
    content = {
        "command": command,
        "environment": environment(),
        "steps": [asdict(step) for step in steps],
        "results": rows,
    }
    write_json(folder / "results.json", content)
    draw_cost(folder)
    return rows


def draw_cost(folder: Path) -> None:
    """``table.md`` and ``cost.png`` from the stored results."""
    stored = folder / "results.json"
    if not stored.exists():
        raise RunError(f"nothing has been measured in {folder} yet")
    rows = json.loads(stored.read_text())["results"]
    write_whole(folder / "table.md", cost_table(rows))
    measured = [row for row in rows if "failure" not in row]
    if measured:
        cost_by_attention(measured, folder / "cost.png")


def cost_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row per size and mechanism."""
    lines = ["| model | attention | ms per step | time / RoPE | peak MB | memory / RoPE |", "|---|---|" + "---:|" * 4]
    for row in rows:
        if "failure" in row:
            lines.append(f"| {row['size']} | {row['attention']} | failed | | | |")
            continue
        memory = "| | |" if row["memory_ratio"] is None else f"| {row['megabytes']:.0f} | {row['memory_ratio']:.2f}x |"
        lines.append(
            f"| {row['size']} | {row['attention']} | {row['milliseconds']:.1f} | {row['time_ratio']:.2f}x {memory}"
        )
    return "\n".join(lines) + "\n"


def peak_megabytes(step: Step, attention: str, device: str) -> float | None:
    """What training steps add to a process that holds model and optimiser; None where it cannot be read."""
    if device == "cpu" and not measurable():
        return None
    arguments = {**asdict(step.model), "attention": attention}
    program = "import sys; from tra.cost import print_peak; print_peak(*sys.argv[1:])"
    command = [sys.executable, "-c", program, json.dumps(arguments), str(step.batch), str(step.length), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RunError(f"peak memory of {attention}: {last[0]}")
    return float(done.stdout)


def print_peak(model: str, batch: str, length: str, device: str) -> None:
    """In a fresh process: one step to allocate what stays, then what three more add."""
    work = training_step(DecoderConfig(**json.loads(model)), int(batch), int(length), device)
    work()

    def steps() -> None:
        for _ in range(3):
            work()

    if device == "cpu":
        print(added_megabytes(steps))
        return
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    steps()
    print((torch.accelerator.max_memory_allocated() - before) / 2**20)


def _line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['size']:<8}{row['attention']:<24}failed: {row['failure']}"
    memory = "" if row["memory_ratio"] is None else f"   {row['megabytes']:.0f} MB ({row['memory_ratio']:.2f}x)"
    time = f"{row['milliseconds']:>9.1f} ms   {row['time_ratio']:.2f}x RoPE"
    return f"{row['size']:<8}{row['attention']:<24}{time}{memory}"

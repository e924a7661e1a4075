"""`tra bench --cost`: time per training step and peak memory of every mechanism, against RoPE."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tra.attention import MECHANISMS
from tra.attention.naming import find_mechanisms
from tra.bench.memory import peak_of_training
from tra.bench.timing import interleaved
from tra.bench.workloads import training_step
from tra.environment import best_device
from tra.files import write_text
from tra.lookup import lookup
from tra.model import DecoderConfig, sized
from tra.progress import say
from tra.report.figures import save_figure
from tra.report.tables import Table, latex


@dataclass(frozen=True)
class Step:
    """What is timed."""

    size: str
    model: DecoderConfig
    batch: int
    length: int
    """Tokens."""


SCALES: dict[str, tuple[Step, ...]] = {
    "paper": (
        Step("mini", sized("mini", vocabulary=50257, dropout=0.0), 64, 256),
        Step("medium", sized("medium", dropout=0.0), 64, 256),
    ),
    "small": (Step("mini", sized("mini", dropout=0.0), 16, 256),),
    "smoke": (Step("smoke", DecoderConfig(vocabulary=8, layers=1, heads=2, width=16, dropout=0.0), 2, 16),),
}
"""The paper's window of 256 and batch of 64; on two cores a smaller batch. Without dropout, with which PyTorch's
attention leaves its fast path on a CPU."""


@dataclass(frozen=True)
class Cost:
    """What a mechanism takes in a model of a size, beside RoPE; only the failure if it failed."""

    size: str
    attention: str
    milliseconds: float = 0.0
    rope_milliseconds: float = 0.0
    megabytes: float | None = None
    rope_megabytes: float | None = None
    failure: str | None = None

    @property
    def time_ratio(self) -> float:
        return self.milliseconds / self.rope_milliseconds

    @property
    def memory_ratio(self) -> float | None:
        return self.megabytes / self.rope_megabytes if self.megabytes is not None and self.rope_megabytes else None

    def to_dict(self) -> dict[str, Any]:
        if self.failure is not None:
            return {"size": self.size, "attention": self.attention, "failure": self.failure}
        stored = {name: value for name, value in asdict(self).items() if name != "failure"}
        return {**stored, "time_ratio": self.time_ratio, "memory_ratio": self.memory_ratio}

    def texts(self) -> list[str]:
        """Time, its ratio, memory and its ratio, as tables show them."""
        if self.failure is not None:
            return ["failed", "", "", ""]
        memory = ("", "")
        if self.memory_ratio is not None:
            memory = (f"{self.megabytes:.0f}", f"{self.memory_ratio:.2f}x")
        return [f"{self.milliseconds:.1f}", f"{self.time_ratio:.2f}x", *memory]

    def __str__(self) -> str:
        head = f"{self.size:<8}{self.attention:<24}"
        if self.failure is not None:
            return f"{head}failed: {self.failure}"
        milliseconds, time_ratio, megabytes, memory_ratio = self.texts()
        memory = f"   {megabytes} MB ({memory_ratio})" if megabytes else ""
        return f"{head}{milliseconds:>9} ms   {time_ratio} RoPE{memory}"


def measure_costs(seconds: float, attention: Sequence[str], scale: str) -> tuple[Sequence[Step], list[Cost]]:
    """Time a training step of each mechanism and of RoPE in turn, for so many seconds.

    A mechanism that fails, for want of memory say, is reported in its row and does not stop the others.
    """
    steps = lookup(SCALES, scale, "scale")
    for name in attention:
        find_mechanisms(name)
    return steps, measure(steps, list(dict.fromkeys(attention or MECHANISMS)), seconds)


def write_costs(folder: Path, rows: Sequence[Cost]) -> None:
    """Write ``table.md``, ``table.tex`` and ``cost.png``."""
    table = cost_table(rows)
    write_text(folder / "table.md", table.markdown())
    write_text(folder / "table.tex", latex([table]))
    measured = [row for row in rows if row.failure is None]
    if measured:
        save_figure(cost_by_attention(measured), folder / "cost.png")


def measure(steps: Sequence[Step], names: Sequence[str], seconds: float) -> list[Cost]:
    """A row for each step and mechanism."""
    device = best_device().type
    rows = []
    for step in steps:
        rope = replace(step.model, attention="rope")
        baseline = peak_of_training(rope, step.batch, step.length, device)
        for name in names:
            try:
                model = replace(step.model, attention=name)
                ours, theirs = (training_step(config, step.batch, step.length, device) for config in (model, rope))
                mine, other = interleaved(ours, theirs, seconds)
                memory = peak_of_training(model, step.batch, step.length, device)
                rows.append(Cost(step.size, name, mine * 1e3, other * 1e3, memory, baseline))
            except RuntimeError as error:
                rows.append(Cost(step.size, name, failure=str(error)))
            say(str(rows[-1]))
    return rows


def cost_table(rows: Sequence[Cost]) -> Table:
    """A row per size and mechanism."""
    headings = ("model", "attention", "ms per step", "time / RoPE", "peak MB", "memory / RoPE")
    return Table(headings, [[row.size, row.attention, *row.texts()] for row in rows], words=2)


def cost_by_attention(rows: Sequence[Cost]) -> Figure:
    """Time per step and peak memory of each mechanism, as multiples of RoPE's."""
    sizes = list(dict.fromkeys(row.size for row in rows))
    figure = Figure(figsize=(9.0, 0.8 + 0.28 * len(rows)), layout="constrained")
    panels = figure.subplots(len(sizes), 2, squeeze=False, sharey="row")
    for (time_panel, memory_panel), size in zip(panels, sizes, strict=True):
        mine = [row for row in reversed(rows) if row.size == size]
        names = [row.attention for row in mine]
        colours = ["C1" if name == "tra" else "0.6" for name in names]
        ratios = ([row.time_ratio for row in mine], [row.memory_ratio or 0.0 for row in mine])
        for panel, values in zip((time_panel, memory_panel), ratios, strict=True):
            panel.barh(names, values, color=colours)
            panel.axvline(1.0, color="black", linewidth=0.8)
            panel.spines[["top", "right"]].set_visible(False)
        time_panel.set(title=f"time per training step, {size}", xlabel="times RoPE")
        memory_panel.set(title=f"peak memory, {size}", xlabel="times RoPE")
    return figure

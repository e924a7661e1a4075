"""`tra bench`: measure the cases and write what was found. A kernel that fails a quick check gets no ratio."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from tra.bench.cases import Case, Comparison, cases
from tra.bench.compare import check_kernel, measured_rows
from tra.bench.cost import measure_costs, write_costs
from tra.bench.gpu import gpu_cases
from tra.bench.memory import peak_of_attention
from tra.bench.timing import interleaved
from tra.bench.trained import LENGTHS, gates_of, trained_cases
from tra.bench.workloads import WIDTH, attention, native
from tra.environment import environment
from tra.files import write_json
from tra.ops.threshold_relative import cpu
from tra.progress import say
from tra.report.figures import save_figure
from tra.runs import Run, load_run


@dataclass(frozen=True)
class BenchRequest:
    """What is to be measured. The command has an option for each field."""

    run: Path | None = None
    """Run folder of a trained model to measure, instead of random inputs."""
    lengths: tuple[int, ...] = ()
    """Tokens at which a run is measured; 4096, 16384 and 65536 by default."""
    folder: Path | None = field(default=None, metadata={"option": "output"})
    """Folder to write; a new one under runs/ by default."""
    seconds: float = 5.0
    """Time for each comparison."""
    only: str = ""
    """Measure only rows whose name contains this."""
    cost: bool = False
    """Measure whole training steps of every mechanism instead: time and peak memory, against RoPE."""
    attention: tuple[str, ...] = ()
    """With --cost: the mechanisms; all by default."""
    scale: str = "small"
    """With --cost: smoke, small (two cores) or paper (the paper's sizes)."""
    variant: str | None = None
    """Build of the CPU kernel to measure: generic, avx2 or avx512; by default the best that runs here."""
    device: str = "cpu"
    """cpu, or cuda: attention alone, in bfloat16, against FlashAttention, FlexAttention and the paper's listing."""
    command: str = field(default="", metadata={"hidden": True})
    """What to write down as the way to repeat it."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"seconds must be positive, got {self.seconds!r}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        for name, given in (("run", self.run), ("variant", self.variant)):
            if self.device == "cuda" and given is not None:
                raise ValueError(f"{name} must be left out with device cuda: it is measured on the CPU")
            if self.cost and given is not None:
                raise ValueError(f"{name} must be left out with --cost, which measures training")
        if not self.cost and (self.attention or self.scale != BenchRequest.scale):
            raise ValueError("attention and scale must be given with --cost alone")
        if self.lengths and self.run is None:
            raise ValueError(f"lengths must be given with a run, got {tuple(self.lengths)} and none")
        if any(length < 2 for length in self.lengths):
            raise ValueError(f"lengths must be at least 2, got {min(self.lengths)}")

    @property
    def place(self) -> Path:
        return self.folder or Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S")


def run_benchmarks(asked: BenchRequest, more: Sequence[Case] = ()) -> dict[str, Any]:
    """Measure what is asked for and write ``bench.json``, with tables and figures; returns what ``bench.json`` holds.

    ``more`` are cases beyond those of `cases`, whose libraries this folder does not import.
    """
    if asked.variant is not None:
        with cpu.using(asked.variant):
            return run_benchmarks(replace(asked, variant=None), more)
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu where PyTorch finds no GPU, got 'cuda'")
    folder = asked.place
    if asked.cost:
        steps, costs = measure_costs(asked.seconds, asked.attention, asked.scale)
        measured = {"steps": [asdict(step) for step in steps], "rows": [row.to_dict() for row in costs]}
    else:
        run = None if asked.run is None else load_run(asked.run)
        chosen = _chosen(asked, run, more)
        check_kernel("triton" if asked.device == "cuda" else "auto", asked.device)
        folder.mkdir(parents=True, exist_ok=True)  # says at once if it cannot be made
        rows = measured_rows(chosen, asked.seconds)
        measured = {**_besides(asked, run), "rows": [row.to_dict() for row in rows]}
    content = {"command": asked.command, "environment": environment(), **measured}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", content)  # before anything is drawn: what was measured is not lost
    if asked.cost:
        write_costs(folder, costs)
    elif asked.device == "cpu" and asked.run is None:
        save_figure(time_by_length(rows), folder / "bench.png")
    return content


def _chosen(asked: BenchRequest, run: Run | None, more: Sequence[Case]) -> list[Case]:
    """The cases that are asked for."""
    if run is not None:
        every = list(trained_cases(run, asked.lengths or LENGTHS))
    else:
        every = list(gpu_cases(asked.device)) if asked.device == "cuda" else [*cases(), *more]
    names = list(dict.fromkeys(case.what for case in every))
    if not any(asked.only in name for name in names):
        raise ValueError(f"only must be part of the name of a row, got {asked.only!r}; rows: {'; '.join(names)}")
    return [case for case in every if asked.only in case.what]


def _besides(asked: BenchRequest, run: Run | None) -> dict[str, Any]:
    """What else is told of the CPU: the kernel's variant; of a run, the quantiles of its gates; where all cases are
    measured, the share of the machine's speed and the peak memory."""
    if asked.device == "cuda":
        return {}
    found: dict[str, Any] = {"variant": cpu.variant}
    if run is not None:
        length = (asked.lengths or LENGTHS)[0]
        found["gates"] = {"tokens": length, "quantiles of -log_gate": gates_of(run, length)}
    elif not asked.only:
        found["share_of_sgemm"] = share_of_sgemm(asked.seconds)
        say(f"share of the machine's sgemm rate when every key is visited: {found['share_of_sgemm']:.2f}")
        every_key = {"default tolerance": False, "every key": True}
        found["peak_memory_megabytes"] = {name: peak_of_attention(every) for name, every in every_key.items()}
        say(f"forward + backward of 1x8x32768: {found['peak_memory_megabytes']} MB")
    return found


def share_of_sgemm(seconds: float) -> float:
    """Multiply-adds per second of the forward that visits every key, over those of a large matrix product."""
    batch, heads, length, size = 1, 8, 4096, 2048
    square = torch.randn(size, size)
    ours, gemm = interleaved(
        attention(native(tolerance=0.0), batch, heads, length, length), lambda: square @ square, seconds
    )
    pairs = batch * heads * length * (length + 1) // 2
    return (2 * pairs * WIDTH / ours) / (size**3 / gemm)


def time_by_length(rows: Sequence[Comparison]) -> Figure:
    """Time against length of attention in one head: TRA visiting every key, TRA stopping early, and SDPA."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, what in zip(panels, ("forward", "forward + backward"), strict=True):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            kind, _, how = row.what.partition(", ")
            if kind == what and row.against == "SDPA":
                batch, heads, length = map(int, row.shape.split("x"))
                lines.setdefault(f"TRA, {how}", {})[length] = row.milliseconds / (batch * heads)
                lines.setdefault("SDPA", {})[length] = row.against_milliseconds / (batch * heads)
        for label, points in sorted(lines.items()):
            panel.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=label)
        panel.set(title=what, xlabel="tokens")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        if lines:
            panel.legend(frameon=False)
    panels[0].set_ylabel("milliseconds per head")
    return figure

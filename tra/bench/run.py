"""`tra bench`: measure the cases and write what was found. A kernel that fails a quick check gets no ratio."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tra.bench.cases import Case, cases
from tra.bench.compare import check_kernel, measured_rows
from tra.bench.cost import Cost, measure_costs, write_costs
from tra.bench.gpu import gpu_cases
from tra.bench.memory import peak_of_attention
from tra.bench.timing import interleaved
from tra.bench.trained import LENGTHS, gates_of, trained_cases
from tra.bench.workloads import WIDTH, attention, native
from tra.environment import environment
from tra.files import write_json
from tra.ops.threshold_relative import cpu
from tra.progress import say
from tra.report.figures import save_figure, time_by_length
from tra.runs import load_run


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
    costs: list[Cost] = []
    if asked.cost:
        steps, costs = measure_costs(asked.seconds, asked.attention, asked.scale)
        measured = {"steps": [asdict(step) for step in steps], "rows": [row.to_dict() for row in costs]}
    elif asked.device == "cuda":
        measured = on_gpu(folder, asked.seconds, asked.only, asked.device)
    else:
        measured = on_cpu(folder, asked, more)
    content = {"command": asked.command, "environment": environment(), **measured}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", content)  # before anything is drawn: what was measured is not lost
    if asked.cost:
        write_costs(folder, costs)
    elif asked.device == "cpu" and asked.run is None:
        save_figure(time_by_length(measured["rows"]), folder / "bench.png")
    return content


def on_gpu(folder: Path, seconds: float, only: str, device: str) -> dict[str, Any]:
    """Attention by itself."""
    check_kernel("triton", device)
    folder.mkdir(parents=True, exist_ok=True)
    return {"rows": [row.to_dict() for row in measured_rows(_chosen(list(gpu_cases(device)), only), seconds)]}


def on_cpu(folder: Path, asked: BenchRequest, more: Sequence[Case]) -> dict[str, Any]:
    """The cases; without ``only`` also the share of the machine's speed and the peak memory. Of a run, its own rows and
    the quantiles of its gates."""
    lengths = asked.lengths or LENGTHS
    run = None if asked.run is None else load_run(asked.run)
    chosen = _chosen([*cases(), *more] if run is None else list(trained_cases(run, lengths)), asked.only)
    check_kernel()
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row.to_dict() for row in measured_rows(chosen, asked.seconds)]
    content: dict[str, Any] = {"variant": cpu.variant, "rows": rows}
    if run is not None:
        gates = {"tokens": lengths[0], "quantiles of -log_gate": gates_of(run, lengths[0])}
        return {**content, "gates": gates}
    if not asked.only:
        content["share_of_sgemm"] = share_of_sgemm(asked.seconds)
        say(f"share of the machine's sgemm rate when every key is visited: {content['share_of_sgemm']:.2f}")
        content["peak_memory_megabytes"] = {
            "default tolerance": peak_of_attention(every_key=False),
            "every key": peak_of_attention(every_key=True),
        }
        say(f"forward + backward of 1x8x32768: {content['peak_memory_megabytes']} MB")
    return content


def _chosen(every: Sequence[Case], only: str) -> list[Case]:
    """Those whose name contains this."""
    names = list(dict.fromkeys(case.what for case in every))
    if not any(only in name for name in names):
        raise ValueError(f"only must be part of the name of a row, got {only!r}; rows: {'; '.join(names)}")
    return [case for case in every if only in case.what]


def share_of_sgemm(seconds: float) -> float:
    """Multiply-adds per second of the forward that visits every key, over those of a large matrix product."""
    batch, heads, length, size = 1, 8, 4096, 2048
    square = torch.randn(size, size)
    ours, gemm = interleaved(
        attention(native(tolerance=0.0), batch, heads, length, length), lambda: square @ square, seconds
    )
    pairs = batch * heads * length * (length + 1) // 2
    return (2 * pairs * WIDTH / ours) / (size**3 / gemm)

"""`tra bench`."""

import json
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tra.cli.parsing import Common, on_console, parse

if TYPE_CHECKING:
    from tra.bench.cases import Case


@dataclass(frozen=True)
class Bench(Common):
    """Time TRA against PyTorch's attention, interleaved in one run, and write the ratios as JSON and a plot.

    With a run, on the queries, keys, values and gates that the trained model makes of its own text or task.
    """

    run: Path | None = None
    """Run folder of a trained model to measure, in place of random inputs."""
    lengths: tuple[int, ...] = ()
    """Tokens at which a run is measured; 4096, 16384 and 65536 by default."""
    output: Path | None = None
    """Folder to write; a new one under runs/ by default."""
    seconds: float = 5.0
    """Time for each comparison."""
    only: str = ""
    """Measure only rows whose name contains this."""
    cost: bool = False
    """Measure instead whole training steps of every mechanism, time and peak memory, against RoPE."""
    attention: tuple[str, ...] = ()
    """With --cost: the mechanisms; all by default."""
    scale: str = "small"
    """With --cost: smoke, small (two cores) or paper (the paper's sizes)."""
    variant: str | None = None
    """Build of the CPU kernel to measure: generic, avx2 or avx512; by default the best that runs here."""
    device: str = "cpu"
    """cpu, or cuda: attention alone, in bfloat16, against FlashAttention, FlexAttention and the paper's listing."""
    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    options = parse(Bench, arguments, "bench")
    if options.seconds <= 0:
        raise ValueError(f"seconds must be positive, got {options.seconds!r}")
    if options.device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {options.device!r}")
    import torch

    from tra.bench import run_benchmarks
    from tra.bench.cost import run_cost_benchmark
    from tra.bench.gpu import run_gpu_benchmarks

    for name, given in (("run", options.run), ("variant", options.variant)):
        if options.device == "cuda" and given is not None:
            raise ValueError(f"{name} must be left out with device cuda: it is measured on the CPU")
        if options.cost and given is not None:
            raise ValueError(f"{name} must be left out with --cost, which measures training")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu where PyTorch finds no GPU, got 'cuda'")
    if not options.cost and (options.attention or options.scale != Bench.scale):
        raise ValueError("attention and scale must be given with --cost alone")
    folder = options.output or Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S")
    with on_console(quiet=options.json):
        if options.cost:
            content = run_cost_benchmark(folder, options.seconds, options.attention, options.scale)
        elif options.device == "cpu":
            content = run_benchmarks(
                folder,
                options.seconds,
                options.only,
                options.run,
                options.lengths,
                _cases_with_transformers(),
                options.variant,
            )
        else:
            content = run_gpu_benchmarks(folder, options.seconds, options.only, options.device)
    print(json.dumps(content, indent=2) if options.json else folder)
    return 0


def _cases_with_transformers() -> "list[Case]":
    """None where transformers is not installed, without which all others can be measured."""
    if find_spec("transformers") is None:
        return []
    from tra.hub.bench import generation_cases

    return list(generation_cases())

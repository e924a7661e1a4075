"""`tra bench`: measure the cases and write what was found. A kernel that fails a quick check gets no ratio."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tra.bench.cases import Case, cases
from tra.bench.compare import check_kernel, measured_rows
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


def run_benchmarks(
    folder: Path,
    seconds: float,
    only: str = "",
    run: Path | None = None,
    lengths: Sequence[int] = (),
    more: Sequence[Case] = (),
    variant: str | None = None,
) -> dict[str, Any]:
    """Measure every row whose name contains ``only``, for so many seconds each, and write ``bench.json`` and
    ``bench.png``. Without ``only`` also the share of the machine's speed and the peak memory.

    ``more`` are cases beyond those of `cases`, whose libraries this folder does not import. With a run, rows of the
    trained model at so many tokens, and ``bench.json`` alone, with the quantiles of its gates.
    With a variant, that build of the CPU kernel.

    Returns:
        What ``bench.json`` holds.
    """
    if variant is not None:
        with cpu.using(variant):
            return run_benchmarks(folder, seconds, only, run, lengths, more)
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}")
    if lengths and run is None:
        raise ValueError(f"lengths must be given with a run, got {tuple(lengths)} and none")
    if any(length < 2 for length in lengths):
        raise ValueError(f"lengths must be at least 2, got {min(lengths)}")
    lengths = tuple(lengths) or LENGTHS
    found = None if run is None else load_run(run)
    every = [*cases(), *more] if found is None else list(trained_cases(found, lengths))
    names = list(dict.fromkeys(case.what for case in every))
    if not any(only in name for name in names):
        raise ValueError(f"only must be part of the name of a row, got {only!r}; rows: {'; '.join(names)}")
    check_kernel()
    folder.mkdir(parents=True, exist_ok=True)
    rows = measured_rows([case for case in every if only in case.what], seconds)
    content: dict[str, Any] = {
        "command": _command(seconds, only, run, lengths),
        "environment": environment(),
        "variant": cpu.variant,
        "rows": [row.to_dict() for row in rows],
    }
    if found is not None:
        content["gates"] = {"tokens": lengths[0], "quantiles of -log_gate": gates_of(found, lengths[0])}
    elif not only:
        content["share_of_sgemm"] = share_of_sgemm(seconds)
        say(f"share of the machine's sgemm rate when every key is visited: {content['share_of_sgemm']:.2f}")
        content["peak_memory_megabytes"] = {
            "default tolerance": peak_of_attention(every_key=False),
            "every key": peak_of_attention(every_key=True),
        }
        say(f"forward + backward of 1x8x32768: {content['peak_memory_megabytes']} MB")
    write_json(folder / "bench.json", content)
    if found is None:
        save_figure(time_by_length(content["rows"]), folder / "bench.png")
    return content


def _command(seconds: float, only: str, run: Path | None, lengths: Sequence[int]) -> str:
    """What to type to measure the same again."""
    words = ["tra", "bench", "--seconds", f"{seconds:g}"]
    if cpu.variant not in (None, list(cpu.LIBRARIES)[-1]):
        words += ["--variant", str(cpu.variant)]
    if run is not None:
        words += ["--run", str(run)]
        words += [] if tuple(lengths) == LENGTHS else ["--lengths", *map(str, lengths)]
    return shlex.join(words + (["--only", only] if only else []))


def share_of_sgemm(seconds: float) -> float:
    """Multiply-adds per second of the forward that visits every key, over those of a large matrix product."""
    batch, heads, length, size = 1, 8, 4096, 2048
    square = torch.randn(size, size)
    ours, gemm = interleaved(
        attention(native(tolerance=0.0), batch, heads, length, length), lambda: square @ square, seconds
    )
    pairs = batch * heads * length * (length + 1) // 2
    return (2 * pairs * WIDTH / ours) / (size**3 / gemm)

"""Time per training step and peak memory of every mechanism, against RoPE: measured by itself, no grid of runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import matplotlib.style

from tra import plugins
from tra.attention import MECHANISMS
from tra.bench.memory import peak_of_training
from tra.bench.timing import interleaved
from tra.bench.workloads import training_step
from tra.environment import best_device, environment
from tra.errors import RunError
from tra.experiments.base import Experiment, Outcome
from tra.experiments.perform import Request
from tra.experiments.reporting import write_report
from tra.files import write_json, write_text
from tra.lookup import lookup
from tra.model import DecoderConfig, sized
from tra.progress import say
from tra.report.figures import cost_by_attention, save_figure
from tra.report.reporting import Report, as_svg, machine
from tra.report.tables import Table, latex

RESULTS = "results.json"


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


class Cost:
    """What `tra reproduce cost` makes."""

    usual_scale = "small"

    def perform(self, request: Request) -> Outcome:
        """Time each mechanism and RoPE in turn, and write ``results.json``, ``table.md``, ``table.tex`` and the figure
        ``cost``; or write them from what is stored.

        A mechanism that fails, for want of memory say, is reported in its row and does not stop the others.
        """
        steps, names = _asked(request)
        stored = request.folder / RESULTS
        if request.train:
            request.folder.mkdir(parents=True, exist_ok=True)
            content: dict[str, Any] = {
                "command": request.command,
                "environment": environment(),
                "steps": [asdict(step) for step in steps],
                "results": measure(steps, names),
            }
            write_json(stored, content)
        else:
            if not stored.exists():
                raise RunError(f"nothing has been measured in {request.folder} yet")
            content = json.loads(stored.read_text(encoding="utf-8"))
        rows = [row for row in content["results"] if row["attention"] in names or not request.attention]
        if not rows:
            raise RunError(f"nothing has been measured of {', '.join(names)} in {request.folder} yet")
        failures = {f"{row['size']} {row['attention']}": row["failure"] for row in rows if "failure" in row}
        table, figure = cost_table(rows), _show(rows, request)
        facts = {"command": content["command"], "machine": machine(content["environment"])}
        write_report(request.folder / Experiment.report_file, Report("cost", facts, [table], figure, failures))
        return Outcome([], [], failures, request.folder, table.markdown(), {**content, "results": rows})

    def plan(self, request: Request) -> Table:
        """A row for each size of model: what a step is, and how long its comparisons take."""
        steps, names = _asked(request)
        rows = [
            [
                step.size,
                str(len(names)),
                str(step.batch),
                f"{step.length:,}",
                f"{step.seconds:g}",
                f"{step.seconds * len(names):g}",
            ]
            for step in steps
        ]
        headings = ("model", "mechanisms", "batch", "tokens", "seconds each", "seconds")
        note = (
            "Each mechanism takes turns with RoPE for so many seconds, and for at least three training steps. "
            "A process of its own then measures its peak memory, which takes time besides."
        )
        return Table(headings, rows, f"Steps at the scale {request.scale}", note)


COST = Cost()


def _asked(request: Request) -> tuple[tuple[Step, ...], list[str]]:
    """The steps and mechanisms of a request, or a ValueError that names what it should not have or does not exist."""
    steps = lookup(SCALES, request.scale, "scale")
    for name, usual in (("seeds", None), ("jobs", 1), ("shard", (1, 1)), ("cluster", None), ("join", ())):
        given = getattr(request, name)
        if given != usual:
            shown = "/".join(map(str, given)) if isinstance(given, tuple) else given
            raise ValueError(f"{name} must not be given for cost, which is measured on one idle machine, got {shown}")
    for name in request.attention:
        plugins.find("MECHANISMS", MECHANISMS, name, "attention")
    try:
        with matplotlib.style.context(request.style or []):
            pass  # a wrong one is found before anything is measured
    except OSError as error:
        raise ValueError(f"style must be a style sheet of matplotlib, got {request.style!r}") from error
    return steps, list(dict.fromkeys(request.attention or MECHANISMS))


def measure(steps: Sequence[Step], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each step and mechanism: milliseconds, megabytes and their ratios to RoPE's, or the failure."""
    device = best_device().type
    rows = []
    for step in steps:
        rope = replace(step.model, attention="rope")
        baseline = peak_of_training(rope, step.batch, step.length, device)
        for name in names:
            row: dict[str, Any] = {"size": step.size, "attention": name}
            try:
                model = replace(step.model, attention=name)
                ours, theirs = (training_step(config, step.batch, step.length, device) for config in (model, rope))
                mine, other = interleaved(ours, theirs, step.seconds)
                memory = peak_of_training(model, step.batch, step.length, device)
                row |= {
                    "milliseconds": mine * 1e3,
                    "rope_milliseconds": other * 1e3,
                    "time_ratio": mine / other,
                    "megabytes": memory,
                    "rope_megabytes": baseline,
                    "memory_ratio": memory / baseline if memory is not None and baseline else None,
                }
            except RuntimeError as error:
                row["failure"] = str(error)
            rows.append(row)
            say(_line(row))
    return rows


def _show(rows: Sequence[Mapping[str, Any]], request: Request) -> dict[str, str]:
    """Write table and figure; returns the figure as SVG, by its name, if there is one."""
    table = cost_table(rows)
    write_text(request.folder / "table.md", table.markdown())
    write_text(request.folder / "table.tex", latex([table]))
    measured = [row for row in rows if "failure" not in row]
    if not measured:
        return {}
    with matplotlib.style.context(request.style or []):
        figure = cost_by_attention(measured)
        for kind in request.formats:
            save_figure(figure, request.folder / f"cost.{kind}")
        return {"cost": as_svg(figure)}


def cost_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row per size and mechanism."""
    headings = ("model", "attention", "ms per step", "time / RoPE", "peak MB", "memory / RoPE")
    return Table(headings, [[row["size"], row["attention"], *_figures(row)] for row in rows], words=2)


def _figures(row: Mapping[str, Any]) -> list[str]:
    if "failure" in row:
        return ["failed", "", "", ""]
    known = row["memory_ratio"] is not None
    memory = (f"{row['megabytes']:.0f}", f"{row['memory_ratio']:.2f}x") if known else ("", "")
    return [f"{row['milliseconds']:.1f}", f"{row['time_ratio']:.2f}x", *memory]


def _line(row: Mapping[str, Any]) -> str:
    head = f"{row['size']:<8}{row['attention']:<24}"
    if "failure" in row:
        return f"{head}failed: {row['failure']}"
    milliseconds, time_ratio, megabytes, memory_ratio = _figures(row)
    memory = f"   {megabytes} MB ({memory_ratio})" if megabytes else ""
    return f"{head}{milliseconds:>9} ms   {time_ratio} RoPE{memory}"

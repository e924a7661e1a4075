"""The report of an experiment as a page: what was run and how, tables, figures, every run, failures, tuning."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal
from urllib.parse import quote

import matplotlib
from matplotlib.figure import Figure

from tra.report.figures import quiet_glyphs
from tra.report.pages import page
from tra.report.tables import TEST_SEQUENCES, Table

STYLES = ("base.css", "report.css")
SCRIPTS = ("dom.js", "report.js")
SECONDS_BETWEEN_LOADS = 10
POINTS = 120
"""Of a curve, at most."""

State = Literal["finished", "running", "failed", "waiting"]


@dataclass(frozen=True)
class RunLine:
    """One run in the list of all."""

    label: str
    folder: str
    """From where the report is."""
    state: State
    steps: int
    """That it is to take."""
    metrics: Sequence[Mapping[str, float]] = ()
    """As logged so far."""
    measured: str = ""
    explorer: str = ""
    """The page of its attention, from where the report is; empty where there is none."""

    @property
    def step(self) -> int:
        """The last one that is logged."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


@dataclass(frozen=True)
class Report:
    """What a page says, in this order; what is empty is left out."""

    title: str
    facts: Mapping[str, str]
    conclusions: Mapping[str, str] = field(default_factory=dict)
    """A sentence for each column."""
    tables: Sequence[Table] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    """SVG by name."""
    failures: Mapping[str, str] = field(default_factory=dict)
    runs: Sequence[RunLine] = ()
    tuning: Mapping[str, str] = field(default_factory=dict)
    """Protocol and budget."""
    tuning_tables: Sequence[Table] = ()
    tuning_runs: Sequence[RunLine] = ()
    progress: str = ""
    """While runs go on: how far they are. The page then loads itself again."""


def report_html(report: Report) -> str:
    """The whole page."""
    parts = [
        f'<header class="bar"><div><h1>{escape(report.title)}</h1>{_progress(report)}</div></header>',
        "<main>",
        _section("What came out", _facts(report.conclusions), "conclusions") if report.conclusions else "",
        _section("Failures", _facts(report.failures), "failures") if report.failures else "",
        _section("Figures", "".join(_figure(*pair) for pair in report.figures.items())) if report.figures else "",
        _section("Tables", "".join(map(table_html, report.tables))) if report.tables else "",
        _section("Runs", _runs(report.runs)) if report.runs else "",
        _section("Tuning", _tuning(report)) if report.tuning else "",
        _section("What was run", _facts(report.facts)),
        "</main>",
    ]
    data = {"again": SECONDS_BETWEEN_LOADS if report.progress else None}
    body = "\n".join(filter(None, parts))
    return page(report.title, body, styles=STYLES, scripts=SCRIPTS, data=data, inline_styles=True)


def _progress(report: Report) -> str:
    if not report.progress:
        return ""
    return f'<p class="progress" role="status">{escape(report.progress)}</p>'


def _section(title: str, content: str, kind: str = "") -> str:
    return f'<section class="panel {kind}"><h2>{escape(title)}</h2>\n{content}</section>'


def _facts(facts: Mapping[str, str]) -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{lines}</dl>"


def table_html(table: Table) -> str:
    """A table that a script can sort; the best of each column is marked."""

    def cell(y: int, x: int, text: str) -> str:
        kind = ' class="word"' if x < table.words else ""
        return f"<td{kind}>{f'<strong>{escape(text)}</strong>' if (y, x) in table.best else escape(text)}</td>"

    def row(y: int, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(cell(y, x, text) for x, text in enumerate(cells)) + "</tr>"

    last = [y for y, cells in enumerate(table.rows) if cells[0] == TEST_SEQUENCES]
    body = "".join(row(y, cells) for y, cells in enumerate(table.rows) if y not in last)
    foot = "".join(row(y, table.rows[y]) for y in last)
    heads = "".join(
        f'<th scope="col"{" class=word" if x < table.words else ""}>{escape(text)}</th>'
        for x, text in enumerate(table.headings)
    )
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    return (
        f'{title}{note}<div class="scroll"><table class="numbers sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody>{f'<tfoot>{foot}</tfoot>' if foot else ''}</table></div>\n"
    )


def as_svg(figure: Figure) -> str:
    """A figure to stand inside a page; the same figure is always the same text."""
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tra"}), quiet_glyphs():
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def _figure(name: str, svg: str) -> str:
    inside = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)
    return f"<figure>{inside}<figcaption>{escape(name)}</figcaption></figure>\n"


def _runs(runs: Sequence[RunLine]) -> str:
    headings = ("run", "attention", "state", "steps", "loss", "tokens/s", "curve", "measured")
    heads = "".join(f'<th scope="col" class="{_kind(name)}">{name}</th>' for name in headings)
    return (
        f'<div class="scroll"><table class="numbers sortable runs"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(map(_run, runs))}</tbody></table></div>\n"
    )


def _kind(heading: str) -> str:
    return "" if heading in ("steps", "loss", "tokens/s") else "word"


def _run(run: RunLine) -> str:
    losses = [(entry["step"], entry["loss"]) for entry in run.metrics if "loss" in entry]
    speed = run.metrics[-1].get("tokens_per_second") if run.metrics else None
    link = f'<a href="{quote(run.explorer)}">explore</a>' if run.explorer else ""
    steps = f"{run.steps:,}" if run.step == run.steps else f"{run.step:,} of {run.steps:,}"
    cells = (
        f'<td class="word"><a href="{quote(run.folder)}/">{escape(run.label)}</a></td>',
        f'<td class="word">{link}</td>',
        f'<td class="word {run.state}">{run.state}</td>',
        f"<td>{steps}</td>",
        f"<td>{f'{losses[-1][1]:.4g}' if losses else ''}</td>",
        f"<td>{'' if speed is None else f'{speed:,.0f}'}</td>",
        f'<td class="word">{_curve(losses)}</td>',
        f'<td class="word measured">{escape(run.measured)}</td>',
    )
    return f"<tr>{''.join(cells)}</tr>"


def _curve(points: Sequence[tuple[float, float]], width: int = 150, height: int = 34) -> str:
    """The loss over the steps, on a logarithmic scale, as one line."""
    points = [(step, math.log(loss)) for step, loss in points if 0 < loss < math.inf]
    if len(points) < 2:
        return ""
    if len(points) > POINTS:
        points = [points[at * (len(points) - 1) // (POINTS - 1)] for at in range(POINTS)]
    steps, losses = zip(*points, strict=True)
    span_x, span_y = max(steps) - min(steps) or 1, max(losses) - min(losses) or 1.0
    places = " ".join(
        f"{2 + (width - 4) * (x - min(steps)) / span_x:.1f},{2 + (height - 4) * (max(losses) - y) / span_y:.1f}"
        for x, y in points
    )
    first, last = (f"{math.exp(losses[at]):.3g} at step {steps[at]:,}" for at in (0, -1))
    said = f"loss {first}, {last}"
    return (
        f'<svg class="curve" width="{width}" height="{height}" role="img" aria-label="{said}"><title>{said}</title>'
        f'<polyline points="{places}"/></svg>'
    )


def _tuning(report: Report) -> str:
    runs = ""
    if report.tuning_runs:
        number = len(report.tuning_runs)
        runs = f"<details><summary>{number:,} runs of tuning</summary>{_runs(report.tuning_runs)}</details>"
    return _facts(report.tuning) + "".join(map(table_html, report.tuning_tables)) + runs


def format_duration(seconds: float) -> str:
    """A time as it is read.

    Example:
        >>> format_duration(42.0), format_duration(1800.0), format_duration(9000.0)
        ('42 s', '30 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def describe_machine(environment: Mapping[str, Any]) -> str:
    """Where something ran, in a line."""
    devices = ", ".join(environment.get("accelerators") or ()) or f"{environment.get('threads')} threads"
    return (
        f"tra {environment.get('tra')}, torch {environment.get('torch')}, Python {environment.get('python')}; "
        f"{environment.get('system')}, {environment.get('processor')}, {devices}"
    )

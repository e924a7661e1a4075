"""Figures from records and models: every function returns a matplotlib figure. Nothing here trains or measures.

Colours, fonts and sizes follow matplotlib's own settings, so that a style sheet changes them.
"""

import io
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from tra.files import written_aside
from tra.report.colours import NULL, SMALLEST_SHOWN, STEPS
from tra.report.records import Record, grouped

LATER = "0.93"
"""Where a key comes after the query, which cannot see it."""
MOST_SHAPES = 50_000
"""Cells that are drawn as shapes; of more, which could not be told apart on paper, each panel is one image."""
LONG_LABEL = 24
"""Characters of a mechanism's label from which on the legend stands below the panels."""
MOST_LINES = 8
"""In one panel."""
FORMATS = ("png", "svg", "pdf")

Points = Sequence[tuple[int, float]]


def measure_by_length(records: Sequence[Record], title: str = "") -> Figure:
    """The measure against length: a panel per set, a line per mechanism, the training range shaded.

    Several results of one set and length are several seeds: the line is their mean, the band their range. More
    mechanisms than eyes can tell apart in one panel have a panel each.
    """
    if len({record.row for record in records}) > MOST_LINES:
        return small_multiples(records, title)
    measure = type(records[0].result)
    panels_of = grouped(records, lambda record: record.result.set_label)
    figure = Figure(figsize=(4.2 * len(panels_of) + 1.6, 4.4), layout="constrained")
    panels = figure.subplots(1, len(panels_of), sharey=True, squeeze=False)[0]
    for panel, (place, mine) in zip(panels, panels_of.items(), strict=True):
        lines = _lines(mine, lambda record: record.row)
        _compare(panel, lines, records[0].trained)
        panel.set(title=place, xlabel=records[0].unit)
        if measure.averages:
            panel.set_ylim(-0.04, 1.04)  # lines at 0 and 1 lie clear of the axes
    panels[0].set_ylabel(measure.titles[measure.measure])
    return _with_legend(figure, panels[0], title)


def small_multiples(records: Sequence[Record], title: str = "") -> Figure:
    """The measure against length: a panel per mechanism with a line per set; those of the others are grey."""
    measure = type(records[0].result)
    rows = grouped(records, lambda record: record.row)
    across = math.ceil(math.sqrt(1.6 * len(rows)))
    down = math.ceil(len(rows) / across)
    figure = Figure(figsize=(2.4 * across + 1.4, 2.2 * down + 0.6), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    every = {row: _lines(some, lambda record: record.result.set_label) for row, some in rows.items()}
    for panel, (row, lines) in zip(panels.flat, every.items(), strict=False):
        for other in every.values():
            for points in other.values():
                places, means, _, _ = _summed(points)
                panel.plot(places, means, color="0.85", linewidth=0.7, zorder=1)
        _compare(panel, lines, records[0].trained)
        panel.set_title(row, fontsize="small", fontweight="bold" if row == "tra" else "normal")
        panel.tick_params(labelsize="x-small")
        if measure.averages:
            panel.set_ylim(-0.05, 1.05)
    for panel in panels.flat[max(0, len(every) - across) : len(every)]:
        panel.tick_params(labelbottom=True)  # also of those with nothing below them
    for panel in panels.flat[len(every) :]:
        panel.set_axis_off()
    figure.supxlabel(records[0].unit, fontsize="small")
    figure.supylabel(measure.titles[measure.measure], fontsize="small")
    return _with_legend(figure, panels.flat[0], title)


def _lines(records: Sequence[Record], label: Callable[[Record], str]) -> dict[str, Points]:
    return {
        name: [(record.result.length, record.result.value) for record in some]
        for name, some in grouped(records, label).items()
    }


def perplexity_by_window(records: Sequence[Record]) -> Figure:
    """Perplexity per token against window, and the loss by position in the longest one; lines and bands as above.

    Of windows side by side: sliding ones are left out.
    """
    rows: dict[str, list[Any]] = {
        row: [record.result for record in some if not record.result.stride]
        for row, some in grouped(records, lambda record: record.row).items()
    }
    trained = records[0].trained
    longest = max(result.length for results in rows.values() for result in results)
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    windows, positions = figure.subplots(1, 2)
    lines = {row: [(result.length, result.perplexity) for result in results] for row, results in rows.items()}
    _compare(windows, lines, trained)
    windows.set(xlabel="window in tokens", ylabel="perplexity per token")
    by_position = {
        row: [
            (2 ** (place + 1), loss)
            for result in results
            if result.length == longest
            for place, loss in enumerate(result.loss_by_position)
            if loss is not None
        ]
        for row, results in rows.items()
    }
    _compare(positions, by_position, trained)
    positions.set(xlabel=f"positions from half of this to this, in windows of {longest:,}", ylabel="loss per token")
    positions.set_xticks(positions.get_xticks()[::2], positions.get_xticklabels()[::2])
    _cut(windows, lines, 2.5)
    _cut(positions, by_position, 2.0)
    return _with_legend(figure, windows, "")


def perplexity_by_steps(records: Sequence[Record], steps_of: Mapping[str, int]) -> Figure:
    """Perplexity per token against training steps, a panel per window; lines and bands as above.

    Args:
        records: of columns that differ in how long was trained.
        steps_of: for each column, the number of steps.
    """
    side_by_side = [record for record in records if not record.result.stride]
    panels_of = grouped(side_by_side, lambda record: record.result.length)
    figure = Figure(figsize=(3.4 * len(panels_of) + 1.6, 3.4), layout="constrained")
    panels = figure.subplots(1, len(panels_of), sharey=True, squeeze=False)[0]
    for panel, (window, mine) in zip(panels, panels_of.items(), strict=True):
        rows = grouped(mine, lambda record: record.row)
        _compare(
            panel,
            {row: [(steps_of[record.column], record.result.value) for record in some] for row, some in rows.items()},
        )
        panel.set(title=f"windows of {window:,}", xlabel="training steps", yscale="log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
    panels[0].set_ylabel("perplexity per token")
    return _with_legend(figure, panels[0], "")


def _cut(panel: Axes, lines: Mapping[str, Points], most: float) -> None:
    """End the axis at so many times the least value: a mechanism that breaks down past its training length would press
    all the others into one line."""
    lowest = min(value for points in lines.values() for _, value in points)
    highest = panel.get_ylim()[1]
    if highest > most * lowest:
        panel.set_ylabel(f"{panel.get_ylabel()} (cut at {most * lowest:.3g})")
    panel.set_ylim(0.95 * lowest, min(highest, most * lowest))


def _compare(panel: Axes, lines: Mapping[str, Points], trained: int | None = None) -> None:
    """A line per mechanism through the mean of the values at each place, with a band over their range; places up to
    the trained length are shaded."""
    colours = _colours(len(lines))
    places = sorted({place for points in lines.values() for place, _ in points})
    for index, (attention, points) in enumerate(lines.items()):
        at, means, lowest, highest = _summed(points)
        colour, ours = colours[index], attention == "tra"
        panel.plot(
            at,
            means,
            marker="os^DvP*X"[index % 8],
            markersize=4,
            linewidth=2.4 if ours else 1.2,
            zorder=3 if ours else 2,
            color=colour,
            label=attention,
        )
        panel.fill_between(at, lowest, highest, color=colour, alpha=0.12, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:,}" for place in places])
    panel.minorticks_off()
    if trained is not None:
        panel.axvspan(places[0] / 1.3, trained, color="0.92", zorder=0, label="trained length")
    panel.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    panel.spines[["top", "right"]].set_visible(False)


def _summed(points: Points) -> tuple[list[int], list[float], list[float], list[float]]:
    """The places from left to right, and the mean, least and greatest value at each."""
    values: dict[int, list[float]] = {}
    for place, value in points:
        values.setdefault(place, []).append(value)
    at = sorted(values)
    mean, low, high = ([f(values[place]) for place in at] for f in (statistics.fmean, min, max))
    return at, mean, low, high


def _colours(number: int) -> list[Any]:
    """Those of the style's own cycle while it has enough."""
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key().get("color", [])
    many = matplotlib.colormaps["tab20"]
    return cycle if number <= len(cycle) else [many(index % many.N) for index in range(number)]


def _with_legend(figure: Figure, panel: Axes, title: str) -> Figure:
    handles, labels = panel.get_legend_handles_labels()
    longest = max(map(len, labels))
    if longest <= LONG_LABEL:
        figure.legend(handles, labels, frameon=False, loc="outside right center", fontsize="small")
    else:  # beside the panels there would be no room left for them
        columns = max(1, int(figure.get_figwidth() * 12 / (longest + 6)))
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
        figure.legend(handles, labels, frameon=False, loc="outside lower center", fontsize="small", ncols=columns)
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


MEASURES = {
    "loss": "log",
    "validation/loss": "log",
    "validation/exact_match": "share",
    "validation/token_accuracy": "share",
    "validation/perplexity": "log",
    "learning_rate": "linear",
    "tokens_per_second": "linear",
}
"""What training logs, and the scale on which it is drawn."""


def measures_by_step(runs: Sequence[tuple[str, Sequence[Mapping[str, float]]]], title: str = "") -> Figure:
    """Training loss, validation, learning rate and speed of several runs against steps, a panel for each.

    Args:
        runs: the row of each run, and its metrics. Runs of one row have one colour.
        title: of the figure.
    """
    rows = list(dict.fromkeys(row for row, _ in runs))
    named = {name for _, metrics in runs for entry in metrics for name in entry}
    shown = {name: scale for name, scale in MEASURES.items() if name in named}
    across = min(3, max(1, len(shown)))
    down = max(1, math.ceil(len(shown) / across))
    figure = Figure(figsize=(4.6 * across + 1.6, 4.0 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    colours = _colours(len(rows))
    for panel, (name, scale) in zip(panels, shown.items(), strict=False):
        told: set[str] = set()
        for row, metrics in runs:
            points = [(entry["step"], entry[name]) for entry in metrics if math.isfinite(entry.get(name, math.nan))]
            if points:
                colour, first = colours[rows.index(row) % len(colours)], row not in told
                label = row if first else "_"
                panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, alpha=0.8, label=label)
                told.add(row)
        panel.set(xlabel="step", ylabel=name.replace("_", " "))
        if scale == "share":
            panel.set_ylim(-0.04, 1.04)
        else:
            panel.set_yscale(scale)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    return _with_legend(figure, panels[0], title) if shown else figure


def attention_heatmap(models: Mapping[str, Sequence[Tensor]], tokens: Sequence[str]) -> Figure:
    """One sequence's attention, a row per layer and a column per head: dark is strong, white exactly 0.

    Args:
        models: of each model, per layer ``[heads, L, L]``; the models stand side by side.
        tokens: the L tokens, for the axes.
    """
    columns = [(name, head) for name, weights in models.items() for head in range(weights[0].shape[0])]
    layers = max(len(weights) for weights in models.values())
    size = 2.6 if len(tokens) <= 40 else 4.0
    figure = Figure(figsize=(size * len(columns) + 0.8, size * layers + 0.7), layout="constrained")
    panels = figure.subplots(layers, len(columns), squeeze=False, sharex=True, sharey=True)
    shown = [token.replace("\n", "\\n").replace("\t", "\\t") for token in tokens]
    upright = 90 if max(map(len, shown)) > 2 else 0  # words would run into each other
    cells = sum(int((layer != 0).sum()) for weights in models.values() for layer in weights)
    for column, (name, head) in enumerate(columns):
        for layer in range(layers):
            panel = panels[layer, column]
            if layer >= len(models[name]):
                panel.set_axis_off()
                continue
            drawn = _draw_weights(panel, heatmap_values(models[name][layer][head]), as_shapes=cells <= MOST_SHAPES)
            panel.set_title(f"{name}, layer {layer + 1}, head {head + 1}", fontsize=8)
            # Tokens are text: a dollar is no mathematics.
            panel.set_xticks(range(len(tokens)), shown, fontsize=4, parse_math=False, rotation=upright)
            panel.set_yticks(range(len(tokens)), shown, fontsize=4, parse_math=False)
            panel.tick_params(length=0, pad=1)
    bar = figure.colorbar(drawn, ax=panels, shrink=0.6, label="size of the attention weight (white: exactly 0)")
    assert bar.solids is not None
    bar.solids.set(rasterized=False, edgecolor="face")  # shapes, too
    signs = [
        Patch(facecolor=NULL, edgecolor="0.6", linewidth=0.5, label="exactly 0"),
        Patch(facecolor=LATER, edgecolor="0.6", linewidth=0.5, label="after the query"),
    ]
    figure.legend(handles=signs, loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return figure


def _draw_weights(panel: Axes, values: Tensor, as_shapes: bool) -> Any:
    """One head: on grey, white where a key can be seen, and on that the weights that are not 0."""
    length = len(values)
    panel.set(xlim=(-0.5, length - 0.5), ylim=(length - 0.5, -0.5), aspect="equal", facecolor=LATER)
    stairs = [(x - 0.5, y - 0.5) for at in range(length) for x, y in ((at, at), (at + 1, at))]
    stairs += [(length - 0.5, length - 0.5), (-0.5, length - 0.5)]
    panel.fill(*zip(*stairs, strict=True), color=NULL, linewidth=0, zorder=0)
    colours, norm = heatmap_colours(), LogNorm(SMALLEST_SHOWN, 1.0)
    if not as_shapes:
        return panel.imshow(values.numpy(), cmap=colours, norm=norm, interpolation="nearest", zorder=1)
    rows, first, last = _stretches(values)
    left, right, top, bottom = first - 0.5, last + 0.5, rows - 0.5, rows + 0.5
    shapes = torch.stack([left, top, right, top, right, bottom, left, bottom], dim=1).view(-1, 4, 2)
    # Without smoothing, which would leave a pale line between neighbours.
    cells = PolyCollection(list(shapes.numpy()), cmap=colours, norm=norm, linewidths=0, antialiaseds=False)
    cells.set_array(values[rows, first].numpy())
    panel.add_collection(cells, autolim=False)
    return cells


def _stretches(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cells side by side whose colours cannot be told apart, as one: their row, first and last column."""
    level = torch.where(values.isnan(), -1, (values.log() * 25).round())  # 230 steps of colour
    begins = torch.ones_like(level, dtype=torch.bool)
    begins[:, 1:] = level[:, 1:] != level[:, :-1]
    start = begins.flatten().nonzero()[:, 0]
    end = torch.cat([start[1:], torch.tensor([level.numel()])]) - 1
    seen = level.flatten()[start] != -1
    start, end, width = start[seen], end[seen], level.shape[1]
    return start // width, start % width, end % width


def heatmap_values(matrix: Tensor) -> Tensor:
    """Sizes of weights for the colour scale: NaN, drawn white, where exactly 0; others no less than the smallest shown.

    Differential attention has negative weights.
    """
    return torch.where(matrix == 0, torch.nan, matrix.abs().clamp(min=SMALLEST_SHOWN)).float().cpu()


def heatmap_colours() -> matplotlib.colors.Colormap:
    """Those of the explorer. What is not drawn lets through what lies below: white, or what cannot be seen."""
    colours = LinearSegmentedColormap.from_list("attention", STEPS)
    return colours.with_extremes(bad=(1.0, 1.0, 1.0, 0.0))


@contextmanager
def styled(style: str | None) -> Iterator[None]:
    """Use a style sheet of matplotlib, by name or path, while the block runs."""
    with ExitStack() as stack:
        if style is not None:
            try:
                stack.enter_context(matplotlib.style.context(style))
            except OSError as error:
                raise ValueError(f"style must be a style sheet of matplotlib, got {style!r}") from error
        yield


@contextmanager
def quiet_glyphs() -> Iterator[None]:
    """What the font lacks is drawn as a box, without a warning for every character."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, in the format that the path's suffix says."""
    drawn = io.BytesIO()  # matplotlib leaves files open when the disk is full
    with quiet_glyphs():
        dpi = matplotlib.rcParams["savefig.dpi"]
        figure.savefig(drawn, format=path.suffix[1:], dpi=160 if dpi == "figure" else dpi)
    with written_aside(path) as aside:
        aside.write_bytes(drawn.getvalue())

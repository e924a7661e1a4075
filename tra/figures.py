"""Figures from results and models. Nothing here trains or measures."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from tra.report import Result

NULL_COLOUR = "white"
SMALLEST_SHOWN = 1e-4
"""Weights below this share the darkest colour; only weights of exactly 0 are white."""


def accuracy_by_length(
    results: Mapping[str, Sequence[Result]], trained: int, path: Path, unit: str = "tokens", title: str = ""
) -> None:
    """Exact match against length: a panel per set, a line per mechanism, the training range shaded.

    Several results of one set and length are several seeds: the line is their mean, the band their range.
    """
    names = list(dict.fromkeys(result["set"] for entries in results.values() for result in entries))
    figure = Figure(figsize=(3.4 * len(names) + 1.6, 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        lines = {
            attention: [(entry["length"], entry["exact_match"]) for entry in entries if entry["set"] == name]
            for attention, entries in results.items()
        }
        _compare(panel, lines, trained)
        panel.set(title=name, xlabel=unit, ylim=(0.0, 1.0))
    panels[0].set_ylabel("exact match")
    _finish(figure, panels[0], title, path)


def perplexity_by_window(results: Mapping[str, Sequence[Result]], trained: int, path: Path) -> None:
    """Perplexity per token against window, and the loss by position in the longest one; lines and bands as above.

    Of windows side by side: sliding ones are left out.
    """
    results = {name: [entry for entry in entries if not entry["stride"]] for name, entries in results.items()}
    longest = max(entry["length"] for entries in results.values() for entry in entries)
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    windows, positions = figure.subplots(1, 2)
    lines = {name: [(entry["length"], entry["perplexity"]) for entry in entries] for name, entries in results.items()}
    _compare(windows, lines, trained)
    windows.set(xlabel="window in tokens", ylabel="perplexity per token")
    by_position = {
        name: [
            (2 ** (place + 1), loss)
            for entry in entries
            if entry["length"] == longest
            for place, loss in enumerate(entry["loss_by_position"])
            if loss is not None
        ]
        for name, entries in results.items()
    }
    _compare(positions, by_position, trained)
    positions.set(xlabel=f"positions from half of this to this, in windows of {longest:,}", ylabel="loss per token")
    positions.set_xticks(positions.get_xticks()[::2], positions.get_xticklabels()[::2])
    _cut(windows, lines, 2.5)
    _cut(positions, by_position, 2.0)
    _finish(figure, windows, "", path)


def _cut(panel: Axes, lines: Mapping[str, Sequence[tuple[int, float]]], most: float) -> None:
    """End the axis at so many times the least value: a mechanism that breaks down past its training length would press
    all the others into one line."""
    lowest = min(value for points in lines.values() for _, value in points)
    highest = panel.get_ylim()[1]
    if highest > most * lowest:
        panel.set_ylabel(f"{panel.get_ylabel()} (cut at {most * lowest:.3g})")
    panel.set_ylim(0.95 * lowest, min(highest, most * lowest))


def _compare(panel: Axes, lines: Mapping[str, Sequence[tuple[int, float]]], trained: int) -> None:
    """A line per mechanism through the mean of the values at each place, with a band over their range."""
    colours = matplotlib.colormaps["tab20" if len(lines) > 10 else "tab10"]
    places = sorted({place for points in lines.values() for place, _ in points})
    for index, (attention, points) in enumerate(lines.items()):
        values: dict[int, list[float]] = {}
        for place, value in points:
            values.setdefault(place, []).append(value)
        at = sorted(values)
        colour, ours = colours(index % colours.N), attention == "tra"
        panel.plot(
            at,
            [sum(values[place]) / len(values[place]) for place in at],
            marker="os^DvP*X"[index % 8],
            markersize=4,
            linewidth=2.4 if ours else 1.2,
            zorder=3 if ours else 2,
            color=colour,
            label=attention,
        )
        lowest, highest = ([f(values[place]) for place in at] for f in (min, max))
        panel.fill_between(at, lowest, highest, color=colour, alpha=0.12, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:,}" for place in places])
    panel.minorticks_off()
    panel.axvspan(places[0] / 1.3, trained, color="0.92", zorder=0, label="trained length")
    panel.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    panel.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, panel: Axes, title: str, path: Path) -> None:
    figure.legend(*panel.get_legend_handles_labels(), frameon=False, loc="outside right center", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10)
    _save(figure, path)


def time_by_length(rows: Sequence[Result], path: Path) -> None:
    """Time against length of attention in one head: TRA visiting every key, TRA stopping early, and SDPA."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, what in zip(panels, ("forward", "forward + backward"), strict=True):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            kind, _, how = row["what"].partition(", ")
            if kind == what and row["against"] == "SDPA":
                batch, heads, length = map(int, row["shape"].split("x"))
                lines.setdefault(f"TRA, {how}", {})[length] = row["milliseconds"] / (batch * heads)
                lines.setdefault("SDPA", {})[length] = row["against_milliseconds"] / (batch * heads)
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
    _save(figure, path)


def cost_by_attention(rows: Sequence[Result], path: Path) -> None:
    """Time per step and peak memory of each mechanism, as multiples of RoPE's."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    figure = Figure(figsize=(9.0, 0.8 + 0.28 * len(rows)), layout="constrained")
    panels = figure.subplots(len(sizes), 2, squeeze=False, sharey="row")
    for (time_panel, memory_panel), size in zip(panels, sizes, strict=True):
        mine = [row for row in reversed(rows) if row["size"] == size]
        names = [row["attention"] for row in mine]
        colours = ["C1" if name == "tra" else "0.6" for name in names]
        for panel, key in ((time_panel, "time_ratio"), (memory_panel, "memory_ratio")):
            panel.barh(names, [row[key] or 0.0 for row in mine], color=colours)
            panel.axvline(1.0, color="black", linewidth=0.8)
            panel.spines[["top", "right"]].set_visible(False)
        time_panel.set(title=f"time per training step, {size}", xlabel="times RoPE")
        memory_panel.set(title=f"peak memory, {size}", xlabel="times RoPE")
    _save(figure, path)


def attention_heatmap(models: Mapping[str, Sequence[Tensor]], tokens: Sequence[str], path: Path) -> None:
    """One sequence's attention, a row per layer and a column per head, white where a weight is exactly 0.

    Args:
        models: of each model, per layer ``[heads, L, L]``; the models stand side by side.
        tokens: the L tokens, for the axes.
    """
    columns = [(name, head) for name, weights in models.items() for head in range(weights[0].shape[0])]
    layers = max(len(weights) for weights in models.values())
    size = 2.6 if len(tokens) <= 40 else 4.0
    figure = Figure(figsize=(size * len(columns) + 0.8, size * layers + 0.4), layout="constrained")
    panels = figure.subplots(layers, len(columns), squeeze=False, sharex=True, sharey=True)
    colours = heatmap_colours()
    shown = [token.replace("\n", "\\n").replace("\t", "\\t") for token in tokens]
    upright = 90 if max(map(len, shown)) > 2 else 0  # words would run into each other
    for column, (name, head) in enumerate(columns):
        for layer in range(layers):
            panel = panels[layer, column]
            if layer >= len(models[name]):
                panel.set_axis_off()
                continue
            matrix = heatmap_values(models[name][layer][head]).numpy()
            norm = LogNorm(SMALLEST_SHOWN, 1.0)
            image = panel.imshow(matrix, cmap=colours, norm=norm, interpolation="nearest")
            panel.set_title(f"{name}, layer {layer + 1}, head {head + 1}", fontsize=8)
            # Tokens are text: a dollar is no mathematics.
            panel.set_xticks(range(len(tokens)), shown, fontsize=4, parse_math=False, rotation=upright)
            panel.set_yticks(range(len(tokens)), shown, fontsize=4, parse_math=False)
            panel.tick_params(length=0, pad=1)
    figure.colorbar(image, ax=panels, shrink=0.6, label="size of the attention weight (white: exactly 0)")
    _save(figure, path)


def heatmap_values(matrix: Tensor) -> Tensor:
    """Sizes of weights for the colour scale: NaN, drawn white, where exactly 0; others no less than the smallest shown.

    Differential attention has negative weights.
    """
    return torch.where(matrix == 0, torch.nan, matrix.abs().clamp(min=SMALLEST_SHOWN)).float().cpu()


def heatmap_colours() -> matplotlib.colors.Colormap:
    return matplotlib.colormaps["viridis"].with_extremes(bad=NULL_COLOUR)


def _save(figure: Figure, path: Path) -> None:
    aside = path.with_name(f".{os.getpid()}.{path.name}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # drawn as a box, once for every character
        figure.savefig(aside, dpi=160)
    os.replace(aside, path)

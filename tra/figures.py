"""Figures from results and models. Nothing here trains or measures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from tra.report import Result

NULL_COLOUR = "white"
SMALLEST_SHOWN = 1e-4
"""Weights below this share the darkest colour; only weights of exactly 0 are white."""


def accuracy_by_length(results: Mapping[str, Sequence[Result]], trained: int, path: Path) -> None:
    """Exact match against length: a panel per set, a line per mechanism, the training range shaded."""
    names = list(dict.fromkeys(result["set"] for entries in results.values() for result in entries))
    figure = Figure(figsize=(3.4 * len(names), 3.2), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        for index, (attention, entries) in enumerate(results.items()):
            points = sorted((result["length"], result["exact_match"]) for result in entries if result["set"] == name)
            panel.plot(*zip(*points, strict=True), marker="os^Dv"[index % 5], label=attention, clip_on=False)
        lengths = sorted({result["length"] for entries in results.values() for result in entries})
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.axvspan(lengths[0] / 1.3, trained, color="0.92", zorder=0, label="trained length")
        panel.set(title=name, xlabel="tokens", ylim=(0.0, 1.0), xlim=(lengths[0] / 1.3, lengths[-1] * 1.3))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("exact match")
    panels[-1].legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=160)


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
    figure.savefig(path, dpi=160)


def attention_heatmap(weights: Sequence[Tensor], tokens: Sequence[str], path: Path, title: str = "") -> None:
    """One sequence's attention, a row per layer and a column per head, white where a weight is exactly 0.

    Args:
        weights: per layer ``[heads, L, L]``.
        tokens: the L tokens, for the axes.
    """
    layers, heads = len(weights), weights[0].shape[0]
    size = 2.6 if len(tokens) <= 40 else 4.0
    figure = Figure(figsize=(size * heads + 0.8, size * layers + 0.4), layout="constrained")
    panels = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    colours = heatmap_colours()
    for layer, matrices in enumerate(weights):
        for head, matrix in enumerate(matrices):
            panel = panels[layer, head]
            image = panel.imshow(
                heatmap_values(matrix).numpy(), cmap=colours, norm=LogNorm(SMALLEST_SHOWN, 1.0), interpolation="nearest"
            )
            panel.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
            panel.set_xticks(range(len(tokens)), tokens, fontsize=4)
            panel.set_yticks(range(len(tokens)), tokens, fontsize=4)
            panel.tick_params(length=0, pad=1)
    figure.colorbar(image, ax=panels, shrink=0.6, label="attention weight (white: exactly 0)")
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=160)


def heatmap_values(matrix: Tensor) -> Tensor:
    """Weights for the colour scale: NaN, drawn white, where exactly 0; others no less than the smallest shown."""
    return torch.where(matrix == 0, torch.nan, matrix.clamp(min=SMALLEST_SHOWN)).float().cpu()


def heatmap_colours() -> matplotlib.colors.Colormap:
    return matplotlib.colormaps["viridis"].with_extremes(bad=NULL_COLOUR)

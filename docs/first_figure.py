"""README's figure, from stored results: `python docs/first_figure.py` writes docs/images/flip-flop.png."""

import json
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
SHOWN = {
    "tra": ("TRA", "#c0392b"),
    "selective": ("selective attention", "#6b7a8f"),
    "fot": ("FoT (forgetting)", "#3f7cac"),
    "stick-breaking": ("stick-breaking", "#95b46a"),
    "rope theta=500000": ("RoPE", "#555555"),
}
"""Rows of the table, what they are called here, and their colours."""
SET = "sparse"


def points() -> dict[str, dict[int, float]]:
    """Exact match by length, the mean over seeds, of the sparse set: of the table, and of TRA also beyond it."""
    table = json.loads((DOCS / "results/table1/results.json").read_text())["results"]
    far = json.loads((DOCS / "results/far/results.json").read_text())["runs"]
    found: dict[str, dict[int, list[float]]] = {row: {} for row in SHOWN}
    for entry in table:
        if (entry["column"], entry["set"]) == ("flip_flop", SET) and entry["attention"] in SHOWN:
            found[entry["attention"]].setdefault(entry["length"], []).append(entry["exact_match"])
    for run in far:
        if run["attention"] == "tra":
            values = [result["exact_match"] for result in run["results"] if result["set"] == SET]
            found["tra"].setdefault(run["length"], []).extend(values)
    return {row: {at: sum(x) / len(x) for at, x in sorted(lengths.items())} for row, lengths in found.items()}


def draw() -> Figure:
    figure = Figure(figsize=(8.4, 3.5), layout="constrained")
    axes = figure.add_subplot()
    last = {}
    for row, by_length in points().items():
        label, colour = SHOWN[row]
        thick = row == "tra"
        axes.plot(
            list(by_length), list(by_length.values()), marker="o", color=colour, linewidth=3 if thick else 1.8,
            markersize=6 if thick else 4, clip_on=False, zorder=3 if thick else 2,
        )  # fmt: skip
        last[label] = (list(by_length)[-1], list(by_length.values())[-1], colour)
    for label, (length, value, colour) in last.items():
        if label == "TRA":
            axes.annotate("TRA: no error at 1,048,576 tokens", (length, value), (-8, -16), textcoords="offset points",
                          color=colour, ha="right", weight="bold")  # fmt: skip
        else:
            axes.annotate(label, (length, value), (9, -3), textcoords="offset points", color=colour)
    axes.axvspan(32, 64, color="#d9e2ec", linewidth=0)
    axes.annotate("trained\nhere", (46, 0.42), ha="center", color="#52606d", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xlim(32, 1.15 * 2**20)
    axes.set_ylim(-0.03, 1.04)
    axes.set_xticks([64, 1024, 16384, 2**20], ["64", "1,024", "16,384", "1,048,576"])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_ylabel("sequences without an error")
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb")
    axes.set_axisbelow(True)
    return figure


if __name__ == "__main__":
    draw().savefig(DOCS / "images" / "flip-flop.png", dpi=160)

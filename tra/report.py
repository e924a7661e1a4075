"""Results as JSON and Markdown, with the machine and versions they came from."""

import csv
import io
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tra
from tra.files import write_whole

Result = Mapping[str, Any]

PERPLEXITIES = {"token": "perplexity", "word": "perplexity_per_word", "byte": "perplexity_per_byte"}


def environment() -> dict[str, Any]:
    """Where a figure was measured."""
    return {
        "tra": tra.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")


def results_table(attention: str, results: Sequence[Result]) -> str:
    """What one run measured, as Markdown."""
    if "perplexity" in results[0]:
        return perplexity_tables([{"attention": attention, "seed": 0, **result} for result in results])
    return exact_match_table({attention: results})


def exact_match_table(results: Mapping[str, Sequence[Result]]) -> str:
    """A Markdown table of exact match: a row per mechanism and set, a column per length."""
    lengths = sorted({result["length"] for entries in results.values() for result in entries})
    lines = [
        "| attention | set | " + " | ".join(f"{length:,}" for length in lengths) + " |",
        "|---|---|" + "---:|" * len(lengths),
    ]
    for attention, entries in results.items():
        for name in dict.fromkeys(result["set"] for result in entries):
            cells = {result["length"]: f"{result['exact_match']:.3f}" for result in entries if result["set"] == name}
            shown = " | ".join(cells.get(length, "") for length in lengths)
            lines.append(f"| {attention} | {name} | {shown} |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 where there is one value only, not a number where one is infinite)."""
    if not all(map(math.isfinite, values)):
        return sum(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def comparison_tables(rows: Sequence[Result], trained: Mapping[str, int]) -> str:
    """Markdown: exact match past the training length, at it, and column by column; mean ± deviation over seeds.

    A set called "all" stands for the others of its column in the first two tables.
    """
    in_training = [row for row in rows if row["length"] <= trained[row["column"]] and _stands(row, rows)]
    past = [row for row in rows if row["length"] > trained[row["column"]] and _stands(row, rows)]
    parts = []
    if past:
        parts.append("## Past the training length\n\nMean over the longer lengths.\n\n" + _table(past, _task_and_set))
    if in_training:
        parts.append("## Within the training length\n\n" + _table(in_training, _task_and_set))
    for column, length in trained.items():
        mine = [row for row in rows if row["column"] == column]
        if mine:
            parts.append(f"## {column}\n\nTrained at up to {length:,}.\n\n" + _table(mine, _set_and_length))
    return "\n".join(parts)


def perplexity_tables(rows: Sequence[Result]) -> str:
    """Markdown: a row per mechanism and a column per window; mean ± deviation over seeds, the lowest bold."""
    parts = []
    for title, measure in PERPLEXITIES.items():
        for how, sliding in (("windows side by side", False), ("sliding windows", True)):
            for name in dict.fromkeys(row["set"] for row in rows):
                mine = [row for row in rows if row["set"] == name and bool(row["stride"]) == sliding]
                if mine:
                    parts.append(f"## Perplexity per {title}, {name}, {how}\n\n" + _table(mine, _window, measure))
    return "\n".join(parts)


def comparison_csv(rows: Sequence[Result], measure: str = "exact_match") -> str:
    """A line per column, set, length and mechanism."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["task", "set", "length", "attention", "seeds", "mean", "deviation"])
    for (column, name, length, attention), values in _grouped(
        rows, lambda row: (row["column"], set_of(row), row["length"], row["attention"]), measure
    ).items():
        mean, deviation = spread(values)
        shown = f"{deviation:.6f}" if len(values) > 1 else ""
        writer.writerow([column, name, length, attention, len(values), f"{mean:.6f}", shown])
    return text.getvalue()


def set_of(result: Result) -> str:
    """The name of a result's set, with the stride of sliding windows."""
    return result["set"] + (f" (stride {result['stride']})" if result.get("stride") else "")


def _table(rows: Sequence[Result], heading: Callable[[Result], str], measure: str = "exact_match") -> str:
    """A row per mechanism and a column per heading; the best mean of each column, if there are several, is bold."""
    best_of = max if measure == "exact_match" else min
    headings = list(dict.fromkeys(heading(row) for row in rows))
    several = len({row["attention"] for row in rows}) > 1
    cells: dict[tuple[str, str], tuple[float, str]] = {}
    for key, parts in _grouped_rows(rows, lambda row: (row["attention"], heading(row))).items():
        # Lengths first, then seeds: the deviation is that between runs.
        by_seed = _grouped(parts, lambda row: row["seed"], measure)
        mean, deviation = spread([statistics.fmean(values) for values in by_seed.values()])
        style = ".4g" if mean >= 1e5 else ".3f" if measure == "perplexity_per_byte" else ".2f"
        cells[key] = mean, f"{mean:{style}}" + (f" ± {deviation:{style}}" if len(by_seed) > 1 else "")
    best = {name: best_of(mean for (_, column), (mean, _) in cells.items() if column == name) for name in headings}
    lines = [f"| attention | {' | '.join(headings)} |", "|---|" + "---:|" * len(headings)]
    for attention in dict.fromkeys(row["attention"] for row in rows):
        shown = []
        for name in headings:
            mean, text = cells.get((attention, name), (0.0, ""))
            is_best = several and mean >= 0.005 and round(mean, 4) == round(best[name], 4)  # not what is shown as 0.00
            shown.append(f"**{text}**" if is_best else text)
        lines.append(f"| {attention} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _grouped_rows(rows: Sequence[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    groups: dict[Any, list[Result]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _grouped(
    rows: Sequence[Result], key: Callable[[Result], Any], measure: str = "exact_match"
) -> dict[Any, list[float]]:
    return {name: [row[measure] for row in group] for name, group in _grouped_rows(rows, key).items()}


def _task_and_set(row: Result) -> str:
    column, name = row["column"], row["set"]
    return column if name == "all" or column.startswith(name) else f"{column} {name}"


def _set_and_length(row: Result) -> str:
    return f"{row['set']} {row['length']:,}"


def _window(row: Result) -> str:
    return f"{row['length']:,}" + (f" by {row['stride']:,}" if row["stride"] else "")


def _stands(row: Result, rows: Sequence[Result]) -> bool:
    return row["set"] == "all" or not any(other["set"] == "all" for other in rows if other["column"] == row["column"])


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()

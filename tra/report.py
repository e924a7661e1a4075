"""Results as JSON and Markdown, with the machine and versions they came from."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tra
from tra.files import write_whole

Result = Mapping[str, Any]


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


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()

"""The benchmarks behind docs/long-sequences.md say what they measure."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


def said(name: str, *options: str) -> str:
    command = [sys.executable, str(FOLDER / name), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout


def test_a_cache_in_mapped_files_needs_memory_for_its_near_part_only(tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    for kind in ("memory", "file"):
        found[kind] = json.loads(
            said("cache_memory.py", "--kind", kind, "--tokens", "131072", "--folder", str(tmp_path))
        )
    assert found["memory"]["cache MB"] == pytest.approx(found["file"]["cache MB"])
    assert found["memory"]["at the end"] > 0.9 * found["memory"]["cache MB"]
    assert found["file"]["at the end"] < 0.4 * found["memory"]["at the end"]


def test_two_processes_send_less_than_ring_attention() -> None:
    heading, alone, two = said(
        "context_parallel.py", "measure", "--lengths", "8192", "--processes", "1", "2"
    ).splitlines()
    assert heading.split()[:4] == ["tokens", "processes", "sent", "MB"]
    assert alone.split()[:3] == ["8,192", "1", "0.0"]
    length, processes, sent, ring = two.split()[:4]
    assert (length, processes, ring) == ("8,192", "2", "16.8")
    assert 0.0 < float(sent) < float(ring)


def test_the_estimate_of_hops_and_bytes_is_right_where_it_is_known() -> None:
    simulate = runpy.run_path(str(FOLDER / "context_parallel.py"))["simulate"]
    # No row reads beyond its own token: nobody asks anybody.
    assert simulate(torch.ones(10), 1 << 16, 16)[1] == 1024.0
    # All rows read everything: the process with rank r gets all r shards before it.
    hops, read = simulate(torch.full((10,), 1e9), 1 << 16, 16, draws=15)
    assert hops == list(range(1, 16))
    assert read == sum(hops) / 15 * (1 << 12)

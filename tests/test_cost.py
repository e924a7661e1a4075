"""The cost of each mechanism against RoPE."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tra import cost
from tra.attention import MECHANISMS
from tra.cli import main
from tra.cost import SCALES, Step, cost_table, measure_cost, peak_megabytes
from tra.model import DecoderConfig


@pytest.fixture
def known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each mechanism costs seconds; the test of real ones is below."""
    monkeypatch.setattr(cost, "peak_megabytes", lambda step, attention, device: 30.0 if attention == "tra" else 20.0)


@pytest.mark.usefixtures("known_memory")
def test_cost_gives_a_row_for_each_mechanism_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cost"
    arguments = ["cost", "--scale", "smoke", "--attention", "tra,nope", "--output", str(folder)]
    assert main(["reproduce", *arguments]) == 0
    shown = capsys.readouterr().out
    content = json.loads((folder / "results.json").read_text())
    assert content["command"] == "tra reproduce " + " ".join(arguments)
    assert content["environment"]["cores"] >= 1
    assert [step["batch"] for step in content["steps"]] == [2]
    rows = content["results"]
    assert [(row["size"], row["attention"]) for row in rows] == [("smoke", "tra"), ("smoke", "nope")]
    for row in rows:
        assert 0 < row["milliseconds"] < 60_000
        assert 0 < row["rope_milliseconds"] < 60_000
        assert row["time_ratio"] == pytest.approx(row["milliseconds"] / row["rope_milliseconds"])
        assert row["rope_megabytes"] == 20.0
    assert [row["memory_ratio"] for row in rows] == [1.5, 1.0]
    table = (folder / "table.md").read_text()
    assert table == cost_table(rows)
    assert table in shown
    assert shown.splitlines()[-1] == str(folder)
    assert (folder / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("known_memory")
def test_cost_measures_every_mechanism_by_default(tmp_path: Path) -> None:
    rows = measure_cost(tmp_path, scale="smoke", attention=(), console=Console(quiet=True), command="")
    assert [row["attention"] for row in rows] == list(MECHANISMS)


def test_cost_table_shows_ratios_and_leaves_unknown_memory_blank() -> None:
    row = {"size": "mini", "attention": "tra", "milliseconds": 12.34, "time_ratio": 1.239}
    known = {**row, "megabytes": 300.4, "memory_ratio": 1.5}
    unknown = {**row, "attention": "nope", "megabytes": None, "memory_ratio": None}
    assert cost_table([known, unknown]) == (
        "| model | attention | ms per step | time / RoPE | peak MB | memory / RoPE |\n"
        "|---|---|---:|---:|---:|---:|\n"
        "| mini | tra | 12.3 | 1.24x | 300 | 1.50x |\n"
        "| mini | nope | 12.3 | 1.24x | | |\n"
    )


def test_paper_scale_has_the_papers_sizes_window_and_batch() -> None:
    assert [(step.size, step.batch, step.length) for step in SCALES["paper"]] == [
        ("mini", 64, 256),
        ("medium", 64, 256),
    ]
    mini, medium = (step.model for step in SCALES["paper"])
    assert (mini.layers, mini.heads, mini.width) == (4, 4, 256)
    assert (medium.layers, medium.heads, medium.width) == (8, 8, 512)


def test_peak_memory_sees_the_activations_of_a_larger_batch() -> None:
    """512 sequences of 64 tokens through 256 hidden units: an activation of them alone is 32 MB."""
    large = Step("large", DecoderConfig(vocabulary=8, layers=1, heads=1, width=64), 512, 64, 0.0)
    measured = [peak_megabytes(step, "rope", "cpu") for step in (replace(large, batch=2), large)]
    if None in measured:
        pytest.skip("this system does not tell a process's peak memory")
    small, big = measured
    assert 0 <= small < 30
    assert small + 64 < big < 1000

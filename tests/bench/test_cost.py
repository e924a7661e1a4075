"""The cost of each mechanism against RoPE: `tra bench --cost`."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.calling import Captured, fails, shows
from tra.attention import MECHANISMS
from tra.bench import cost
from tra.bench.cost import SCALES, Cost, cost_table, measure_costs, write_costs
from tra.model import DecoderConfig
from tra.progress import shown


@pytest.fixture(autouse=True)
def known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each mechanism costs seconds; real ones are in the tests of the memory."""

    def peak(config: DecoderConfig, batch: int, length: int, device: str) -> float:
        return 30.0 if config.attention == "tra" else 20.0

    monkeypatch.setattr(cost, "peak_of_training", peak)


def test_the_command_gives_a_row_for_each_mechanism_asked_for(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "cost"
    words = ["bench", "--cost", "--scale", "smoke", "--seconds", "0.05", "--attention", "tra", "nope"]
    assert shows([*words, "--output", str(folder)], capsys).splitlines()[-1] == str(folder)
    content = json.loads((folder / "bench.json").read_text())
    assert content["command"] == " ".join(["tra", *words, "--output", str(folder)])
    assert content["environment"]["cores"] >= 1
    assert [step["batch"] for step in content["steps"]] == [2]
    rows = content["rows"]
    assert [(row["size"], row["attention"]) for row in rows] == [("smoke", "tra"), ("smoke", "nope")]
    for row in rows:
        assert 0 < row["milliseconds"] < 60_000
        assert 0 < row["rope_milliseconds"] < 60_000
        assert row["time_ratio"] == pytest.approx(row["milliseconds"] / row["rope_milliseconds"])
        assert row["rope_megabytes"] == 20.0
    assert [row["memory_ratio"] for row in rows] == [1.5, 1.0]
    assert (folder / "table.md").read_text().count("\n| smoke |") == 2
    assert r"\begin{tabular}{llrrrr}" in (folder / "table.tex").read_text()
    assert (folder / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_every_mechanism_is_measured_by_default() -> None:
    _, rows = measure_costs(0.01, (), "smoke")
    assert [row.attention for row in rows] == list(MECHANISMS)
    assert not any(row.failure for row in rows)


def test_a_mechanism_that_fails_is_named_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    real = cost.training_step

    def short_of_memory(config: DecoderConfig, *arguments: Any) -> Any:
        if config.attention == "tra":
            raise RuntimeError("not enough memory")
        return real(config, *arguments)

    monkeypatch.setattr(cost, "training_step", short_of_memory)
    with shown(Console(soft_wrap=True)):
        _, rows = measure_costs(0.01, ("tra", "nope"), "smoke")
    assert rows[0].to_dict() == {"size": "smoke", "attention": "tra", "failure": "not enough memory"}
    assert rows[1].to_dict()["milliseconds"] > 0
    write_costs(tmp_path, rows)
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["smoke", "tra", "failed:", "not", "enough", "memory"]
    assert said[1].startswith("smoke   nope")
    assert (tmp_path / "table.md").read_text().splitlines()[2] == "| smoke | tra | failed |  |  |  |"
    assert (tmp_path / "cost.png").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ("--cost --scale smok", "scale must be one of paper, small, smoke, got 'smok'; did you mean 'smoke'?"),
        ("--cost --attention tro", "got 'tro'; did you mean 'tra'?"),
        ("--attention tra", "attention and scale must be given with --cost alone"),
        ("--cost --run somewhere", "run must be left out with --cost"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    words: str, message: str, tmp_path: Path, capsys: Captured
) -> None:
    assert message in fails(["bench", *words.split(), "--output", str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()


def test_the_table_shows_ratios_and_leaves_unknown_memory_blank() -> None:
    known = Cost("mini", "tra", 12.34, 9.96, 300.4, 200.27)
    unknown = Cost("mini", "nope", 12.34, 9.96)
    assert cost_table([known, unknown]).markdown() == (
        "| model | attention | ms per step | time / RoPE | peak MB | memory / RoPE |\n"
        "|---|---|---:|---:|---:|---:|\n"
        "| mini | tra | 12.3 | 1.24x | 300 | 1.50x |\n"
        "| mini | nope | 12.3 | 1.24x |  |  |\n"
    )


def test_paper_scale_has_the_papers_sizes_window_and_batch() -> None:
    assert [(step.size, step.batch, step.length) for step in SCALES["paper"]] == [
        ("mini", 64, 256),
        ("medium", 64, 256),
    ]
    mini, medium = (step.model for step in SCALES["paper"])
    assert (mini.layers, mini.heads, mini.width) == (4, 4, 256)
    assert (medium.layers, medium.heads, medium.width) == (8, 8, 512)

"""The cost of each mechanism against RoPE."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tra.attention import MECHANISMS
from tra.errors import RunError
from tra.experiments import Request, cost, load_experiment
from tra.experiments.cost import COST, SCALES, cost_table
from tra.model import DecoderConfig
from tra.progress import shown


@pytest.fixture
def known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each mechanism costs seconds; real ones are in the tests of the memory."""

    def peak(config: DecoderConfig, batch: int, length: int, device: str) -> float:
        return 30.0 if config.attention == "tra" else 20.0

    monkeypatch.setattr(cost, "peak_of_training", peak)


@pytest.fixture
def request_for(tmp_path: Path) -> Request:
    return Request(tmp_path / "cost", "smoke", attention=("tra", "nope"), command="tra reproduce cost")


def test_cost_is_found_by_its_name() -> None:
    assert load_experiment("cost") is COST
    assert COST.usual_scale in SCALES


@pytest.mark.usefixtures("known_memory")
def test_cost_gives_a_row_for_each_mechanism_asked_for(request_for: Request) -> None:
    outcome = COST.perform(request_for)
    folder = request_for.folder
    content = json.loads((folder / "results.json").read_text())
    assert content == outcome.content
    assert outcome.folder == folder
    assert outcome.failures == {}
    assert content["command"] == "tra reproduce cost"
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
    assert (folder / "table.md").read_text() == outcome.shown == cost_table(rows).markdown()
    assert r"\begin{tabular}{llrrrr}" in (folder / "table.tex").read_text()
    assert (folder / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("known_memory")
def test_cost_measures_every_mechanism_by_default(request_for: Request) -> None:
    outcome = COST.perform(replace(request_for, attention=()))
    assert [row["attention"] for row in outcome.content["results"]] == list(MECHANISMS)
    assert outcome.failures == {}


@pytest.mark.usefixtures("known_memory")
def test_a_mechanism_that_fails_is_named_and_stops_no_other(
    request_for: Request, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = cost.training_step

    def short_of_memory(config: DecoderConfig, *arguments: Any) -> Any:
        if config.attention == "tra":
            raise RuntimeError("not enough memory")
        return real(config, *arguments)

    monkeypatch.setattr(cost, "training_step", short_of_memory)
    with shown(Console(soft_wrap=True)):
        outcome = COST.perform(request_for)
    assert outcome.failures == {"smoke tra": "not enough memory"}
    assert outcome.shown.splitlines()[2] == "| smoke | tra | failed |  |  |  |"
    assert outcome.content["results"][1]["milliseconds"] > 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["smoke", "tra", "failed:", "not", "enough", "memory"]
    assert said[1].startswith("smoke   nope")
    assert (request_for.folder / "cost.png").exists()


@pytest.mark.usefixtures("known_memory")
def test_stored_results_are_drawn_again_without_measuring(
    request_for: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = COST.perform(request_for)
    stored = (request_for.folder / "results.json").read_bytes()
    for name in ("table.md", "table.tex", "cost.png"):
        (request_for.folder / name).unlink()

    def no_measuring(*arguments: Any) -> None:
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr(cost, "measure", no_measuring)
    again = COST.perform(replace(request_for, train=False, attention=(), formats=("svg", "pdf"), style="ggplot"))
    assert again.content == measured.content
    assert (request_for.folder / "table.md").read_text() == again.shown == measured.shown
    assert (request_for.folder / "table.tex").exists()
    assert b"<svg" in (request_for.folder / "cost.svg").read_bytes()
    assert (request_for.folder / "cost.pdf").read_bytes().startswith(b"%PDF")
    assert not (request_for.folder / "cost.png").exists()
    assert (request_for.folder / "results.json").read_bytes() == stored

    one = COST.perform(replace(request_for, train=False, attention=("nope",)))
    assert [row["attention"] for row in one.content["results"]] == ["nope"]
    with pytest.raises(RunError, match="nothing has been measured of alibi in"):
        COST.perform(replace(request_for, train=False, attention=("alibi",)))


def test_nothing_is_drawn_where_nothing_was_measured(request_for: Request) -> None:
    with pytest.raises(RunError, match=r"nothing has been measured in .* yet"):
        COST.perform(replace(request_for, train=False))
    assert not request_for.folder.exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seeds": 3}, "seeds must not be given for cost, .* got 3"),
        ({"jobs": 2}, "jobs must not be given for cost, .* got 2"),
        ({"shard": (1, 2)}, "shard must not be given for cost, .* got 1/2"),
        ({"cluster": "slurm"}, "cluster must not be given for cost, .* got slurm"),
        ({"scale": "smok"}, "scale must be one of paper, small, smoke, got 'smok'; did you mean 'smoke'?"),
        ({"attention": ("tro",)}, "attention must be one of .*, got 'tro'; did you mean 'tra'?"),
        ({"style": "ggplott"}, "style must be a style sheet of matplotlib, got 'ggplott'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cost_cannot_use_is_refused_before_anything_is_measured(
    changes: dict[str, Any], message: str, request_for: Request
) -> None:
    for ask in (COST.perform, COST.plan):
        with pytest.raises(ValueError, match=message):
            ask(replace(request_for, **changes))
    assert not request_for.folder.exists()


def test_the_plan_says_what_would_be_timed_and_writes_nothing(request_for: Request) -> None:
    table = COST.plan(replace(request_for, scale="paper", attention=("tra", "nope", "tra")))
    assert table.headings == ("model", "mechanisms", "batch", "tokens", "seconds each", "seconds")
    assert table.rows == [["mini", "2", "64", "256", "30", "60"], ["medium", "2", "64", "256", "60", "120"]]
    assert not request_for.folder.exists()


def test_cost_table_shows_ratios_and_leaves_unknown_memory_blank() -> None:
    row = {"size": "mini", "attention": "tra", "milliseconds": 12.34, "time_ratio": 1.239}
    known = {**row, "megabytes": 300.4, "memory_ratio": 1.5}
    unknown = {**row, "attention": "nope", "megabytes": None, "memory_ratio": None}
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

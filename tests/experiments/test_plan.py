"""`--dry-run`: what an experiment would take, without taking it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.small import flip_flop, of_flip_flop, smoke
from tra.cli import main
from tra.experiments import Request, Tuning, plan
from tra.experiments.figure2 import FIGURE2
from tra.experiments.grid import chosen_rows
from tra.experiments.plan import evaluation_tokens, parameters, tokens_per_second, training_tokens
from tra.experiments.table1 import TABLE1
from tra.model import Decoder, sized
from tra.recipes import Evaluation, Recipe, build_recipe

HEADINGS = ["column", "attention", "runs", "parameters", "tokens trained", "tokens measured"]
HEADINGS += ["hours, estimated", "A40 hours"]


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """1,000 tokens per second, of which mechanism at which length was asked."""
    asked: list[tuple[str, int]] = []

    def speed(recipe: Recipe, tokens: int) -> float:
        asked.append((recipe.model.label, tokens))
        return 1000.0

    monkeypatch.setattr(plan, "tokens_per_second", speed)
    return asked


def test_a_line_for_each_column_and_row_and_one_for_all(tmp_path: Path, known_speed: list[tuple[str, int]]) -> None:
    """Flip-flop at 8: 4 steps of 4 sequences; measured on 4 sequences at 8 and 16 tokens, in tuning at 8."""
    experiment = of_flip_flop(seeds=3, tuning=Tuning({"steps": (4, 12)}, rows=("rope",)))
    table = experiment.plan(Request(tmp_path / "out", "smoke"))
    assert list(table.headings) == HEADINGS
    number = f"{sum(weight.numel() for weight in Decoder(flip_flop().model).parameters()):,}"
    rope = f"{sum(weight.numel() for weight in Decoder(flip_flop('rope').model).parameters()):,}"
    assert [list(row)[:-2] for row in table.rows] == [
        ["flip_flop (tuning)", "rope", "2", rope, "128", "32"],
        ["flip_flop", "tra", "3", number, "128", "96"],
        ["flip_flop", "rope", "3", rope, "128", "96"],
        ["all", "", "8", "", "", ""],
    ]
    assert known_speed == [("rope", 8), ("tra", 8)], "each kind of model is measured once"
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("known_speed")
def test_hours_follow_from_tokens_and_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = flip_flop().changed({"steps": 1_000_000})
    experiment = of_flip_flop(scales={"smoke": {"c": lambda attention="tra": longer}}, rows=("tra",), seeds=2)
    table = experiment.plan(Request(tmp_path, "smoke"))
    # 32 million tokens and the 96 to measure at a third of their cost, at a thousand per second, twice.
    assert [row[-2] for row in table.rows] == [f"{2 * (32e6 + 96 / 3) / 1e3 / 3600:.2g}"] * 2


def test_parameters_are_counted_without_making_the_model() -> None:
    for attention in ("tra", "t5", "cope", "differential"):
        config = flip_flop(attention).model
        assert parameters(config) == sum(weight.numel() for weight in Decoder(config).parameters())


def test_tokens_of_a_string_task_are_more_than_its_symbols() -> None:
    recipe = TABLE1.scales["smoke"]["copy_unique"]().changed({"evaluations": (Evaluation("copy", 16, 3),)})
    task = recipe.build_task()
    assert task.tokens_in(8) > 8
    assert training_tokens(recipe) == 4 * 4 * task.tokens_in(8)
    assert evaluation_tokens(recipe) == 3 * task.tokens_in(16)


def test_speed_is_measured_in_real_steps_and_leaves_no_trace() -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert 0 < tokens_per_second(flip_flop(), 8) < 1e9
    assert torch.rand(1) == expected


@pytest.mark.usefixtures("known_speed")
def test_the_command_prints_the_plan_trains_nothing_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_training(*arguments: Any) -> None:
        raise AssertionError("nothing may be trained")

    monkeypatch.setattr("tra.experiments.local_jobs.train", no_training)
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "figure1", "--scale", "smoke", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "## Runs at the scale smoke" in shown.out
    assert "| all |  | 2 |" in shown.out
    assert main(["reproduce", "figure1", "--scale", "smoke", "--seeds", "2", "--dry-run", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["headings"] == HEADINGS
    assert [row[:3] for row in table["rows"]] == [
        ["flip_flop", "tra", "2"],
        ["flip_flop", "fot", "2"],
        ["all", "", "4"],
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("known_speed", "small_texts")
def test_the_paper_can_be_planned(tmp_path: Path) -> None:
    table = TABLE1.plan(Request(tmp_path / "out", "paper", attention=("tra",)))
    columns = list(TABLE1.scales["paper"])
    # Six choices for a fifth of the steps and two for two fifths with two seeds, then four seeds.
    assert [row[0] for row in table.rows] == [*(f"{column} (tuning)" for column in columns), *columns, "all"]
    assert [row[2] for row in table.rows] == ["10"] * 6 + ["4"] * 6 + ["84"]
    assert table.rows[6][4] == f"{20_000 * 64 * 512:,}"
    table = FIGURE2.plan(Request(tmp_path / "out", "paper"))
    reported = [row for row in table.rows if "tuning" not in row[0]][:-1]
    assert [(row[1], row[2]) for row in reported] == [(row.label, "4") for row in chosen_rows(FIGURE2.rows, ())]
    recipe = FIGURE2.scales["paper"]["wikitext103"]()
    assert table.rows[0][3] == f"{sum(weight.numel() for weight in Decoder(recipe.model).parameters()):,}"
    assert reported[0][4] == f"{recipe.steps * recipe.batch * recipe.build_task().tokens_in(recipe.length):,}"
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_is_said_by_the_plan_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*smoke("figure1", tmp_path / "out", "--dry-run"), "--attention", "rop"]) == 2
    assert "did you mean 'rope'?" in capsys.readouterr().err
    assert main([*smoke("figure1", tmp_path / "out", "--dry-run"), "--shard", "9/9"]) == 2
    assert "shard must be one of at most 2" in capsys.readouterr().err


def test_gpu_hours_are_the_papers_own_for_its_own_runs() -> None:
    """20,000 steps of 64 windows of 256 tokens: 65.88 minutes with the mini model, 178.19 with the medium one."""
    for size, minutes in (("mini", 65.88), ("medium", 178.19)):
        changes = {"length": 256, "steps": 20_000, "batch": 64, "evaluations": ()}
        recipe = replace(build_recipe("flip-flop").changed(changes), model=sized(size))
        assert plan.a40_seconds(recipe) / 60 == pytest.approx(minutes, rel=1e-3)

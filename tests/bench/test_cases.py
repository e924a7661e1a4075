"""What is measured against what."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tra.bench import cases
from tra.bench.cases import Case, Comparison
from tra.hub.bench import generation_cases
from tra.model import DecoderConfig

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def case_of(what: str, shape: str) -> Case:
    (found,) = (case for case in cases.cases() if (case.what, case.shape) == (what, shape))
    return found


def test_every_row_that_the_docs_quote_can_be_measured_again() -> None:
    stored = json.loads((RESULTS / "bench" / "bench.json").read_text())["rows"]
    assert stored
    every = [*cases.cases(), *generation_cases()]
    found = {(case.what, case.shape, against) for case in every for against in case.others}
    assert {(row["what"], row["shape"], row["against"]) for row in stored} <= found


@pytest.mark.parametrize(
    "what, shape, expected",
    [("forward, every key", "8x4x512", (8, 4, 512, 64)), ("decode one token", "1x8x4096", (1, 8, 1, 64))],
)
def test_both_sides_of_attention_have_the_shape_that_the_row_says(
    what: str, shape: str, expected: tuple[int, ...]
) -> None:
    case = case_of(what, shape)
    others = [prepare for against, prepare in case.others.items() if against != "paper, compiled"]
    assert others
    for prepare in (case.ours, *others):
        assert prepare()().shape == expected


@pytest.mark.parametrize(
    "builder, what, shape, numbers",
    [
        ("new_token", "new token of a medium model", "1x4096", (4096,)),
        ("new_token", "new token of a small model", "1x128", (128,)),
        ("training_step", "training step, medium model", "8x128", (8, 128)),
    ],
)
def test_whole_models_are_compared_that_differ_in_the_mechanism_alone(
    builder: str, what: str, shape: str, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[DecoderConfig, tuple[int, ...]]] = []
    monkeypatch.setattr(cases, builder, lambda config, *others: made.append((config, others)))
    case = case_of(what, shape)
    case.ours()
    case.others["RoPE on SDPA"]()
    (ours, same), (theirs, others) = made
    assert same == others == numbers
    assert (ours.attention, theirs.attention) == ("tra", "rope")
    assert replace(ours, attention="rope") == theirs
    assert builder == "new_token" or ours.dropout == 0.0, "with dropout PyTorch's attention leaves its fast path"


def test_every_comparison_with_pytorch_has_a_goal_but_that_of_the_medium_model() -> None:
    without = {case.what for case in cases.cases() if case.goal is None}
    assert without == {"growth per doubling, default tolerance", "new token of a medium model"}
    assert all(next(iter(case.others)) in ("SDPA", "RoPE on SDPA") for case in cases.cases() if case.goal is not None)


def test_generation_is_compared_with_transformers_on_the_same_tokens() -> None:
    for case in generation_cases():
        (theirs,) = case.others.values()
        made = case.ours()()
        assert made.shape == (1, 72)
        assert torch.equal(made, theirs()())


def test_a_row_says_what_was_measured_and_what_is_wanted() -> None:
    row = Comparison("forward, every key", "8x4x512", "SDPA", 1.5, 2.0, goal=1.0)
    assert row.ratio == 0.75
    said = " ".join(str(row).split())
    assert said == "forward, every key 8x4x512 1.500 ms SDPA 2.000 ms 0.75x (goal 1)"
    assert "goal" not in str(replace(row, goal=None))

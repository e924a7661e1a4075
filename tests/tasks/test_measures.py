"""Exact match and perplexity, by hand; what is stored of them, now and by version 0.1."""

import base64
import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tra.tasks import TASKS, Evaluation, ExactMatch, Perplexity, Prediction, Result, build_task
from tra.tasks.measures import MOST_STRETCHES, packed, unpacked

STORED = Path(__file__).parents[1] / "version_01.json"


def prediction(right: list[list[int]], loss: list[list[float]], counted: list[list[int]]) -> Prediction:
    return Prediction(torch.tensor(right).bool(), torch.tensor(loss), torch.tensor(counted).bool())


# Three sequences in two batches: all right; one of two right; wrong only where nothing counts.
SOME = [
    prediction([[0, 1, 1], [1, 0, 1]], [[0.0, 0.5, 0.25], [1.0, 3.0, 0.0]], [[0, 1, 1], [1, 1, 0]]),
    prediction([[0, 0, 1]], [[0.0, 0.0, 0.75]], [[0, 0, 1]]),
]


def test_exact_match_by_hand() -> None:
    found = ExactMatch.of(Evaluation("iid", 4, 3), SOME)
    assert (found.set, found.length, found.examples, found.stride) == ("iid", 4, 3, None)
    assert found.value == found.exact_match == 2 / 3
    assert found.token_accuracy == 4 / 5
    assert found.loss == (0.5 + 0.25 + 1.0 + 3.0 + 0.75) / 5
    assert found.sequences == 3
    assert found.split().tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]


def test_perplexity_by_hand() -> None:
    found = Perplexity.of(Evaluation("valid", 3, None, 2), SOME, words=2, size=11)
    total = 5.5
    assert (found.tokens, found.words, found.bytes, found.windows) == (5, 2, 11, 3)
    assert found.loss == total / 5
    assert found.value == found.perplexity == math.exp(total / 5)
    assert found.perplexity_per_word == math.exp(total / 2)
    assert found.perplexity_per_byte == math.exp(total / 11)
    # Positions 0 and 1 together, then 2 and 3.
    assert found.loss_by_position == [(0.5 + 1.0 + 3.0) / 3, (0.25 + 0.75) / 2]
    assert (found.set_label, found.sequences) == ("valid (stride 2)", 3)
    assert found.split().tolist() == [[0.75, 2.0], [4.0, 2.0], [0.75, 1.0]]


def test_positions_without_a_token_that_counts_have_no_loss() -> None:
    only_last = prediction([[0] * 9], [[0.0] * 8 + [2.0]], [[0] * 8 + [1]])
    found = Perplexity.of(Evaluation("valid", 9, None, 1), [only_last], 1, 1)
    assert found.loss_by_position == [None, None, None, 2.0]


def test_what_is_too_large_for_a_number_is_infinite() -> None:
    found = Perplexity.of(Evaluation("valid", 3, None), [prediction([[0]], [[800.0]], [[1]])], words=0, size=4)
    assert (found.perplexity, found.perplexity_per_word) == (math.inf, math.inf)
    assert found.perplexity_per_byte == math.exp(200)


def test_parts_give_back_every_field_that_is_shown() -> None:
    """The ratio of their sums, finished: what intervals are made of."""
    for found in (
        ExactMatch.of(Evaluation("iid", 4, 3), SOME),
        Perplexity.of(Evaluation("valid", 3, None), SOME, words=2, size=11),
    ):
        score, weight = found.split().double().sum(dim=0)
        for field in found.titles:
            assert found.finish(score / weight, field).item() == pytest.approx(getattr(found, field), rel=1e-6)


def test_a_long_text_has_few_parts_that_sum_to_it() -> None:
    windows, rng = 3 * MOST_STRETCHES + 5, torch.Generator().manual_seed(0)
    loss = torch.rand(windows, 7, generator=rng)
    every = Prediction(torch.ones(windows, 7).bool(), loss, torch.ones(windows, 7).bool())
    found = Perplexity.of(Evaluation("valid", 7, windows), [every], 100, 1000)
    parts = found.split()
    assert parts.shape == (MOST_STRETCHES, 2)
    assert set(parts[:, 1].tolist()) == {21.0, 28.0}  # three windows or four
    torch.testing.assert_close(parts.sum(dim=0), torch.tensor([loss.sum(), 7.0 * windows]), rtol=1e-5, atol=0.0)
    assert found.windows == windows


@pytest.mark.parametrize(
    "numbers",
    [torch.empty(0), torch.tensor([1.5, -0.0, math.inf, 1e-30]), torch.randn(111, 2), torch.randn(2, 63).T],
    ids=["none", "odd", "many", "transposed"],
)
def test_numbers_come_back_from_their_short_text(numbers: Tensor) -> None:
    text = packed(numbers)
    assert json.loads(json.dumps(text)) == text
    assert torch.equal(unpacked(text), numbers.flatten())


def test_a_thousand_matches_take_a_line() -> None:
    assert len(packed(torch.ones(2000))) < 100


@pytest.mark.parametrize("measure", [ExactMatch, Perplexity])
def test_results_come_back_from_json(measure: type[Result]) -> None:
    wanted = Evaluation("valid", 3, 3)
    found = ExactMatch.of(wanted, SOME) if measure is ExactMatch else Perplexity.of(wanted, SOME, 2, 11)
    assert measure.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def rows_of_before() -> list[tuple[type[Result], dict[str, Any]]]:
    """What version 0.1 measured and stored."""
    rows = json.loads(STORED.read_text())["results"]
    return [(ExactMatch if "exact_match" in row else Perplexity, row) for row in rows]


@pytest.mark.parametrize(
    "changes, wrong",
    [
        ({"tokens": "x"}, "tokens of a result must be a whole number, got 'x'"),
        ({"loss": None}, "loss of a result must be a finite number, got None"),
        ({"perplexity": 10**400}, "perplexity of a result must be a finite number, got 1000"),
        ({"loss_by_position": [0.5, "x"]}, "loss_by_position of a result must be a finite number or None, got 'x'"),
        ({"loss_by_position": {}}, "loss_by_position of a result must be of type list"),
        ({"length": 10**30}, "length must be at most 16,777,216, got 1,000"),
        ({"examples": -1}, "examples of a result must be at least 0, got -1"),
        ({"parts": "x"}, "base64"),
        ({"parts": packed(torch.zeros(3))}, "parts must be pairs of numbers"),
        ({"parts": base64.b64encode(zlib.compress(bytes(1 << 27))).decode()}, "of at most 67,108,864 bytes"),
    ],
)
def test_what_is_wrong_in_a_stored_result_is_named(changes: dict[str, Any], wrong: str) -> None:
    text = Perplexity("valid", 8, None, None, 0.5, None, 8, 2, 30, 1.6, math.inf, 1.1, [0.5, None])
    assert Perplexity.from_dict(text.to_dict()) == text
    with pytest.raises(ValueError, match=wrong):
        Perplexity.from_dict({**text.to_dict(), **changes})


@pytest.mark.parametrize("measure", [ExactMatch, Perplexity])
def test_a_result_that_is_not_that_of_its_parts_is_refused(measure: type[Result]) -> None:
    """Means are made of the one, intervals of the other."""
    wanted = Evaluation("valid", 3, 3)
    found = ExactMatch.of(wanted, SOME) if measure is ExactMatch else Perplexity.of(wanted, SOME, 2, 11)
    for value in (found.value + 0.25, 100.0, math.inf):
        with pytest.raises(
            ValueError, match=f"{measure.measure} of a result must be that of its parts, .*, got {value:g}"
        ):
            measure.from_dict({**found.to_dict(), measure.measure: value})


def test_what_version_01_stored_is_read() -> None:
    rows = rows_of_before()
    assert {kind for kind, _ in rows} == {ExactMatch, Perplexity}
    for kind, row in rows:
        result = kind.from_dict(row)
        assert result.value == row[kind.measure]
        assert {name: value for name, value in result.to_dict().items() if name in row} == {
            name: value for name, value in row.items() if name in result.to_dict()
        }
        assert result.parts is None
        assert result.sequences == row["examples"]
        if kind is Perplexity:
            assert result.split() is None
        else:  # matches or not, whichever sequences they were
            assert result.split().mean(dim=0).tolist() == pytest.approx([row["exact_match"], 1.0])
            assert len(result.split()) == row["examples"]


def test_a_measure_says_which_way_is_better_and_what_tables_show() -> None:
    assert (ExactMatch.higher_is_better, Perplexity.higher_is_better) == (True, False)
    assert (ExactMatch.averages, Perplexity.averages) == (True, False)
    for measure in (ExactMatch, Perplexity):
        assert next(iter(measure.titles)) == measure.measure


def test_the_measure_belongs_to_the_task() -> None:
    assert {name: build_task(name).measure for name in TASKS} == {
        name: Perplexity if name == "text" else ExactMatch for name in TASKS
    }

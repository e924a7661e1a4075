"""Multi-query associative recall against a solver, and against the definition in the authors' Zoology."""

import re
from collections import Counter

import pytest
import torch

import tra.tasks.recall
from tests.tasks.reading import assert_even
from tra.tasks import Evaluation, Recall


def solve(words: list[str], pairs: int) -> dict[int, str]:
    """The answer at every place that follows a key which was among the pairs."""
    known = dict(zip(words[0 : 2 * pairs : 2], words[1 : 2 * pairs : 2], strict=True))
    asked = range(2 * pairs, len(words) - 1)
    return {place + 1: known[words[place]] for place in asked if words[place] in known}


def draw(task: Recall, length: int, batch: int = 100, seed: int = 0) -> list[tuple[list[str], list[int]]]:
    sample = task.sample(torch.Generator().manual_seed(seed), batch, length)
    assert sample.tokens.shape == sample.counted.shape == (batch, length)
    return [
        ([task.symbols[token] for token in tokens], [place for place, counts in enumerate(counted) if counts])
        for tokens, counted in zip(sample.tokens.tolist(), sample.counted.tolist(), strict=True)
    ]


@pytest.mark.parametrize("length", [4, 6, 8, 30, 64, 128])
@pytest.mark.parametrize("mixed", [True, False])
def test_solver_gets_every_sample_right(length: int, mixed: bool) -> None:
    seen = set()
    for words, counted in draw(Recall(40, mixed=mixed), length):
        pairs = len(counted)
        seen.add(pairs)
        keys, values = words[0 : 2 * pairs : 2], words[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert {key[0] for key in keys} == {"k"}
        assert {value[0] for value in values} == {"v"}
        answers = solve(words, pairs)
        assert counted == sorted(answers)
        assert all(words[place] == answer for place, answer in answers.items())
        rest = Counter(words[2 * pairs :])
        assert rest == Counter({**dict.fromkeys(keys + values, 1), ".": length - 4 * pairs}) - Counter()
        assert all((place - 1) % 2 == 0 for place in counted)
    most = length // 4
    assert seen == {most} if not mixed else seen <= set(range(1, most + 1)) and len(seen) > most // 2


def test_gaps_follow_zoologys_power_law() -> None:
    """The gap of the only key: p proportional to (gap + 1) ** (0.01 - 1) over the room that is left."""
    gaps = Counter((counted[0] - 1 - 2) // 2 for _, counted in draw(Recall(), 64, batch=4000) if len(counted) == 1)
    number, room = gaps.total(), (64 - 2) // 2
    weight = [(gap + 1) ** -0.99 for gap in range(room)]
    assert number > 200
    for gap in range(room):
        expected = number * weight[gap] / sum(weight)
        assert abs(gaps[gap] - expected) < 5 * expected**0.5 + 1


def test_keys_and_numbers_of_pairs_are_drawn_evenly() -> None:
    drawn = draw(Recall(12), 32, batch=4000)
    assert_even((words[0] for words, _ in drawn), [f"k{index}" for index in range(12)])
    assert_even((words[1] for words, _ in drawn), [f"v{index}" for index in range(12)])
    assert_even((len(counted) for _, counted in drawn), range(1, 9))


def test_the_example_of_the_docstring_is_right() -> None:
    ((first, rest),) = re.findall(r"^    (k.+?) (\. .+)$", tra.tasks.recall.__doc__, re.MULTILINE)
    words = f"{first} {rest.replace('-> ', '')}".split()
    answers = solve(words, len(first.split()) // 2)
    assert [words[place] for place in sorted(answers)] == re.findall(r"-> (\S+)", rest) == list(answers.values())


def test_evaluation_set_is_fixed_by_name_and_length() -> None:
    (batch,) = Recall().evaluation_batches(Evaluation("recall", 16, 2), 2)
    torch.manual_seed(5)
    (again,) = Recall().evaluation_batches(Evaluation("recall", 16, 2), 2)
    assert torch.equal(batch.tokens, again.tokens)
    # Published figures name these sets: if this fails, raise the task's version.
    assert Recall().text(batch.tokens[0]) == "k27 v198 k195 v1 k1 v129 k145 v11 k145 v11 k195 v1 k1 v129 k27 v198"


def test_wrong_argument_is_named() -> None:
    with pytest.raises(ValueError, match="keys must be at least 2, got 1"):
        Recall(1)
    for length in (2, 7):
        with pytest.raises(ValueError, match=f"length must be an even number of tokens, at least 4, got {length}"):
            draw(Recall(), length)
    with pytest.raises(ValueError, match="length must be at most the alphabet of 3 for symbols without repeats, got 4"):
        draw(Recall(3), 16)

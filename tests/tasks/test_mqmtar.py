"""Recall by keys of two tokens against a dict."""

import re

import pytest
import torch

import tra.tasks.mqmtar
from tests.tasks.reading import assert_even, read
from tra.tasks import Evaluation, MultiTokenRecall

Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(words: list[str]) -> list[Pair]:
    groups = [words[start : start + 4] for start in range(0, len(words), 4)]
    return [((a, b), (c, d)) for a, b, c, d in groups]


def split(words: list[str]) -> tuple[list[Pair], list[Pair]]:
    """The pairs before <sep>, and the questions with their answers after it."""
    middle = words.index("<sep>")
    assert (words[0], words[-1]) == ("<bos>", "<eos>")
    return pairs_of(words[1:middle]), pairs_of(words[middle + 1 : -1])


@pytest.mark.parametrize("length, alphabet, queries", [(4, 2, 4), (16, 2, 3), (48, 16, 4), (200, 9, 7)])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_dict_knows_every_answer(length: int, alphabet: int, queries: int, mixed: bool) -> None:
    numbers = set()
    for words, counted in read(MultiTokenRecall(alphabet, mixed, queries), length, 200, seed=length):
        pairs, asked = split(words)
        known = dict(pairs)
        assert len(known) == len(pairs), "no key comes twice"
        assert all(known[key] == value for key, value in asked)
        assert len({key for key, _ in asked}) == len(asked) == min(queries, len(pairs))
        start = words.index("<sep>") + 1
        assert counted == [start + 4 * query + place for query in range(len(asked)) for place in (2, 3)]
        numbers.add(len(pairs))
    assert max(numbers) == length // 4
    assert mixed or len(numbers) == 1


def test_numbers_of_pairs_tokens_and_questions_are_drawn_evenly() -> None:
    drawn = [split(words) for words, _ in read(MultiTokenRecall(6), 32, 4000, seed=0)]
    assert_even((len(pairs) for pairs, _ in drawn), range(1, 9))
    for side, kind in enumerate("kv"):
        for place in range(2):
            assert_even((pairs[0][side][place] for pairs, _ in drawn), (f"{kind}{index}" for index in range(6)))
    full = [(pairs, asked) for pairs, asked in drawn if len(pairs) == 8]
    assert_even((pairs.index(pair) for pairs, asked in full for pair in asked), range(8))


def test_the_example_of_the_docstring_is_right() -> None:
    (example,) = re.findall(r"^    (<bos>.+)$", tra.tasks.mqmtar.__doc__ or "", re.MULTILINE)
    pairs, asked = split(example.replace("-> ", "").split())
    assert dict(asked) == dict(pairs)
    assert example.count("->") == 2


def test_evaluation_set_is_fixed_by_name_and_length() -> None:
    (batch,) = MultiTokenRecall().evaluation_batches(Evaluation("mqmtar", 8, 2), 2)
    # Published figures name these sets: if this fails, raise the task's version.
    assert (
        MultiTokenRecall().text(batch.tokens[0])
        == "<bos> k9 k14 v0 v8 k11 k8 v9 v13 <sep> k11 k8 v9 v13 k9 k14 v0 v8 <eos>"
    )


def test_wrong_argument_is_named() -> None:
    with pytest.raises(ValueError, match="queries must be at least 1, got 0"):
        MultiTokenRecall(queries=0)
    for length in (0, 6):
        with pytest.raises(ValueError, match=f"length must be a multiple of 4 tokens, at least one, got {length}"):
            MultiTokenRecall().sample(torch.Generator(), 1, length)
    with pytest.raises(ValueError, match="length must be at most the alphabet of 4 for symbols without repeats, got 5"):
        MultiTokenRecall(2).sample(torch.Generator(), 1, 20)

import re

import pytest
import torch

import tra.tasks.induct
from tests.tasks.reading import assert_even, read
from tra.tasks import Evaluation, InductOnce, InductRecent

TASKS = [InductOnce, InductRecent]
SHORTEST = {InductOnce: 2, InductRecent: 3}


def solve(prompt: list[str]) -> str:
    """What came after the last occurrence of the symbol that the prompt ends with."""
    assert prompt[0] == "<bos>"
    assert prompt[-2] == "<sep>"
    string, asked = prompt[1:-2], prompt[-1]
    return string[max(place for place, symbol in enumerate(string) if symbol == asked) + 1]


def draw(task: InductOnce, length: int, batch: int = 50, seed: int = 0) -> list[tuple[list[str], str, str]]:
    """String, symbol asked for and answer of each sequence, checking all else on the way."""
    drawn = []
    for words, counted in read(task, length, batch, seed):
        *prompt, answer, _ = words
        string, asked = prompt[1:-2], prompt[-1]
        assert answer == solve(prompt)
        assert counted == [len(prompt)]
        assert set(string) <= {f"s{index}" for index in range(task.alphabet)}
        if type(task) is InductOnce:
            assert len(set(string)) == len(string)
        else:
            assert 2 <= string.count(asked) <= 4
        drawn.append((string, asked, answer))
    return drawn


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 10, 60])
@pytest.mark.parametrize("alphabet", [2, 3, 10, 60, 100])
def test_solver_gets_every_sample_right(task: type[InductOnce], length: int, alphabet: int) -> None:
    shortest, message = SHORTEST[task], None
    if length < shortest:
        message = f"length must be at least {shortest} symbols for {task.name}, got {length}"
    elif task is InductOnce and length > alphabet:
        message = f"length must be at most the alphabet of {alphabet} for symbols without repeats, got {length}"
    if message is not None:
        with pytest.raises(ValueError, match=message):
            draw(task(alphabet), length)
        return
    for seed in range(5):
        assert {len(string) for string, *_ in draw(task(alphabet, mixed=False), length, seed=seed)} == {length}
        assert {len(string) for string, *_ in draw(task(alphabet), length, seed=seed)} <= {*range(shortest, length + 1)}


@pytest.mark.parametrize("task", TASKS)
def test_lengths_and_symbols_are_drawn_evenly(task: type[InductOnce]) -> None:
    strings, asked, answers = zip(*draw(task(12), 9, batch=4000), strict=True)
    alphabet = [f"s{index}" for index in range(12)]
    assert_even(map(len, strings), range(SHORTEST[task], 10))
    assert_even(asked, alphabet)
    assert_even(answers, alphabet)


def test_once_asks_for_every_place_that_has_a_next_one() -> None:
    drawn = draw(InductOnce(mixed=False), 9, batch=4000)
    assert_even((string.index(asked) for string, asked, _ in drawn), range(8))


def test_recent_puts_two_to_four_occurrences_at_any_place_that_has_a_next_one() -> None:
    def counts(length: int) -> list[int]:
        return [string.count(asked) for string, asked, _ in draw(InductRecent(mixed=False), length, batch=4000)]

    assert_even(counts(3), [2])
    assert_even(counts(4), [2, 3])
    assert_even(counts(9), [2, 3, 4])
    drawn = draw(InductRecent(mixed=False), 9, batch=4000)
    assert_even((place for string, asked, _ in drawn for place in range(9) if string[place] == asked), range(8))


def test_examples_of_the_docstring_are_right() -> None:
    examples = re.findall(r"^    (.+) -> (\S+) +(once|most recent)$", tra.tasks.induct.__doc__, re.MULTILINE)
    assert [kind for _, _, kind in examples] == ["once", "most recent"]
    for prompt, answer, _ in examples:
        assert solve(prompt.split()) == answer


@pytest.mark.parametrize("task", TASKS)
def test_sample_depends_on_the_generator_alone(task: type[InductOnce]) -> None:
    first = draw(task(), 10, seed=3)
    torch.manual_seed(99)
    assert draw(task(), 10, seed=3) == first
    assert draw(task(), 10, seed=4) != first


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_set_is_fixed_by_name_and_length(task: type[InductOnce]) -> None:
    def texts(examples: int, batch: int) -> list[str]:
        parts = task().evaluation_batches(Evaluation("induct", 8, examples), batch)
        return [task().text(tokens) for part in parts for tokens in part.tokens]

    first = texts(150, 10)
    assert texts(200, 33)[:150] == first
    assert len(set(first)) == 150
    assert {len(text.split(" ")) for text in first} == {13}
    # Published figures name these sets: if this fails, raise the task's version.
    assert first[0] == FIRST_SEQUENCE[task.name]


FIRST_SEQUENCE = {
    "induct_once": "<bos> s84 s97 s23 s33 s63 s90 s76 s79 <sep> s84 s97 <eos>",
    "induct_recent": "<bos> s54 s75 s43 s18 s89 s10 s89 s6 <sep> s89 s6 <eos>",
}


def test_wrong_argument_is_named() -> None:
    for task in TASKS:
        with pytest.raises(ValueError, match="alphabet must be at least 2, got 1"):
            task(1)
        with pytest.raises(ValueError, match="evaluation set must be one of induct, got 'iid'"):
            next(task().evaluation_batches(Evaluation("iid", 8, 1), 1))

import re

import pytest
import torch

import tra.tasks.copy
from tests.tasks.reading import assert_even, read
from tra.tasks import CopyRepeat, CopyUnique, Evaluation

TASKS = [CopyUnique, CopyRepeat]


def continuation(prompt: list[str]) -> list[str]:
    """What belongs after a prompt that ends with <sep>."""
    assert prompt[0] == "<bos>"
    assert prompt[-1] == "<sep>"
    return [*prompt[1:-1], "<eos>"]


def draw(task: CopyUnique, length: int, batch: int = 50, seed: int = 0) -> list[list[str]]:
    """The strings of a sample, checking all else on the way."""
    strings = []
    for words, counted in read(task, length, batch, seed):
        start = words.index("<sep>") + 1
        string = words[1 : start - 1]
        assert words[start:] == continuation(words[:start])
        assert counted == list(range(start, len(words)))
        assert set(string) <= {f"s{index}" for index in range(task.alphabet)}
        assert type(task) is CopyRepeat or len(set(string)) == len(string)
        strings.append(string)
    return strings


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1, 2, 3, 10, 60])
@pytest.mark.parametrize("alphabet", [2, 3, 10, 60, 100])
def test_solver_gets_every_sample_right(task: type[CopyUnique], length: int, alphabet: int) -> None:
    if task is CopyUnique and length > alphabet:
        message = f"length must be at most the alphabet of {alphabet} for symbols without repeats, got {length}"
        with pytest.raises(ValueError, match=message):
            draw(task(alphabet), length)
        return
    for seed in range(5):
        assert {len(string) for string in draw(task(alphabet, mixed=False), length, seed=seed)} == {length}
        assert {len(string) for string in draw(task(alphabet), length, seed=seed)} <= set(range(1, length + 1))


@pytest.mark.parametrize("task", TASKS)
def test_lengths_and_symbols_are_drawn_evenly(task: type[CopyUnique]) -> None:
    strings = draw(task(20), 8, batch=4000)
    assert_even(map(len, strings), range(1, 9))
    assert_even((symbol for string in strings for symbol in string), (f"s{index}" for index in range(20)))


def test_symbols_repeat_as_often_as_by_chance() -> None:
    assert_even(map(tuple, draw(CopyRepeat(4, mixed=False), 2, batch=4000)), PAIRS)


PAIRS = [(f"s{first}", f"s{second}") for first in range(4) for second in range(4)]


def test_examples_of_the_docstring_are_right() -> None:
    examples = re.findall(r"^    (.+) -> (.+)$", tra.tasks.copy.__doc__, re.MULTILINE)
    assert len(examples) == 1
    for prompt, answer in examples:
        assert continuation(prompt.split()) == answer.split()


@pytest.mark.parametrize("task", TASKS)
def test_sample_depends_on_the_generator_alone(task: type[CopyUnique]) -> None:
    first = draw(task(), 10, seed=3)
    torch.manual_seed(99)
    assert draw(task(), 10, seed=3) == first
    assert draw(task(), 10, seed=4) != first


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_set_is_fixed_by_name_and_length(task: type[CopyUnique]) -> None:
    def texts(examples: int, batch: int) -> list[str]:
        parts = task().evaluation_batches(Evaluation("copy", 6, examples), batch)
        return [task().text(tokens) for part in parts for tokens in part.tokens]

    first = texts(150, 10)
    assert texts(200, 33)[:150] == first
    assert len(set(first)) == 150
    assert {len(text.split(" ")) for text in first} == {15}
    # Published figures name these sets: if this fails, raise the task's version.
    assert first[0] == FIRST_SEQUENCE[task.name]


FIRST_SEQUENCE = {
    "copy_unique": "<bos> s79 s22 s58 s84 s11 s43 <sep> s79 s22 s58 s84 s11 s43 <eos>",
    "copy_repeat": "<bos> s31 s94 s29 s9 s16 s88 <sep> s31 s94 s29 s9 s16 s88 <eos>",
}


@pytest.mark.parametrize("task", TASKS)
def test_wrong_argument_is_named(task: type[CopyUnique]) -> None:
    with pytest.raises(ValueError, match=f"length must be at least 1 symbols for {task.name}, got 0"):
        draw(task(), 0)
    with pytest.raises(ValueError, match="alphabet must be at least 2, got 1"):
        task(1)
    with pytest.raises(ValueError, match="evaluation set must be one of copy, got 'coppy'; did you mean 'copy'"):
        next(task().evaluation_batches(Evaluation("coppy", 6, 1), 1))


def test_negative_length_is_named() -> None:
    with pytest.raises(ValueError, match="length must be at least 1 symbols for copy_repeat, got -1"):
        draw(CopyRepeat(), -1)

"""Sort and reverse against Python's own."""

import re
from collections.abc import Callable

import pytest
import torch

import tra.tasks.reverse
import tra.tasks.sort
from tests.tasks.reading import assert_even, read
from tra.tasks import CopyRepeat, Evaluation, Reverse, Sort

SOLVERS: dict[type[CopyRepeat], Callable[[list[str]], list[str]]] = {
    Sort: lambda string: sorted(string, key=lambda symbol: int(symbol[1:])),
    Reverse: lambda string: string[::-1],
}
each_task = pytest.mark.parametrize("task", SOLVERS)


def solve(task: type[CopyRepeat], prompt: list[str]) -> list[str]:
    assert (prompt[0], prompt[-1]) == ("<bos>", "<sep>")
    return [*SOLVERS[task](prompt[1:-1]), "<eos>"]


@each_task
@pytest.mark.parametrize("length, alphabet", [(1, 2), (2, 3), (9, 32), (60, 12)])
def test_solver_gets_every_sample_right(task: type[CopyRepeat], length: int, alphabet: int) -> None:
    for mixed in (True, False):
        lengths = set()
        for words, counted in read(task(alphabet, mixed=mixed), length, 300, seed=length):
            start = words.index("<sep>") + 1
            assert words[start:] == solve(task, words[:start])
            assert counted == list(range(start, len(words)))
            lengths.add(start - 2)
        assert (lengths <= set(range(1, length + 1)) and max(lengths) == length) if mixed else lengths == {length}


@each_task
def test_lengths_and_symbols_are_drawn_evenly(task: type[CopyRepeat]) -> None:
    strings = [words[1 : words.index("<sep>")] for words, _ in read(task(12), 8, 4000, seed=0)]
    assert_even(map(len, strings), range(1, 9))
    assert_even((string[0] for string in strings), (f"s{index}" for index in range(12)))


@each_task
def test_the_example_of_the_docstring_is_right(task: type[CopyRepeat]) -> None:
    page = {Sort: tra.tasks.sort, Reverse: tra.tasks.reverse}[task].__doc__
    ((prompt, answer),) = re.findall(r"^    (<bos>.+) -> (.+)$", page or "", re.MULTILINE)
    assert solve(task, prompt.split()) == answer.split()


# Published figures name these sets: if this fails, raise the task's version.
@pytest.mark.parametrize(
    "task, first",
    [
        (Sort(), "<bos> s30 s16 s7 s2 <sep> s2 s7 s16 s30 <eos>"),
        (Reverse(), "<bos> s3 s27 s8 s23 <sep> s23 s8 s27 s3 <eos>"),
    ],
)
def test_evaluation_set_is_fixed_by_name_and_length(task: CopyRepeat, first: str) -> None:
    (batch,) = task.evaluation_batches(Evaluation(task.name, 4, 2), 2)
    torch.manual_seed(5)
    (again,) = task.evaluation_batches(Evaluation(task.name, 4, 2), 2)
    assert torch.equal(batch.tokens, again.tokens)
    assert task.text(batch.tokens[0]) == first

import re

import pytest

import tra.tasks.majority
from tests.tasks.reading import assert_even, read
from tra.tasks import Evaluation, Majority


def solve(prompt: list[str]) -> str:
    assert (prompt[0], prompt[-1]) == ("<bos>", "<sep>")
    return "1" if prompt.count("1") > prompt.count("0") else "0"


@pytest.mark.parametrize("length", [1, 2, 7, 40])
@pytest.mark.parametrize("mixed", [True, False])
def test_solver_gets_every_sample_right(length: int, mixed: bool) -> None:
    lengths = set()
    for words, counted in read(Majority(mixed=mixed), length, 200, seed=length):
        *prompt, answer, end = words
        assert (answer, end) == (solve(prompt), "<eos>")
        assert counted == [len(prompt)]
        lengths.add(len(prompt) - 2)
    assert lengths == (set(range(1, length + 1)) if mixed else {length})


def test_answers_are_drawn_evenly_where_there_can_be_no_tie() -> None:
    assert_even((words[-2] for words, _ in read(Majority(mixed=False), 9, 4000, seed=0)), ["0", "1"])


def test_the_example_of_the_docstring_is_right() -> None:
    ((prompt, answer),) = re.findall(r"^    (<bos>.+) -> (\S+)$", tra.tasks.majority.__doc__ or "", re.MULTILINE)
    assert solve(prompt.split()) == answer


def test_evaluation_set_is_fixed_by_name_and_length() -> None:
    (batch,) = Majority().evaluation_batches(Evaluation("majority", 8, 2), 2)
    # Published figures name these sets: if this fails, raise the task's version.
    assert Majority().text(batch.tokens[0]) == "<bos> 0 1 1 0 0 1 1 1 <sep> 1 <eos>"


def test_there_are_two_symbols() -> None:
    with pytest.raises(ValueError, match="alphabet must be 2 for majority, got 3"):
        Majority(3)

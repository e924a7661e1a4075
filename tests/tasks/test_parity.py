import re

import pytest
import torch

import tra.tasks.parity
from tests.tasks.reading import assert_even, read
from tra.tasks import Evaluation, Parity


def solve(prompt: list[str]) -> str:
    assert (prompt[0], prompt[-1]) == ("<bos>", "<sep>")
    return "1" if prompt[1:-1].count("1") % 2 else "0"


@pytest.mark.parametrize("length", [1, 2, 7, 40])
@pytest.mark.parametrize("mixed", [True, False])
def test_solver_gets_every_sample_right(length: int, mixed: bool) -> None:
    lengths = set()
    for words, counted in read(Parity(mixed=mixed), length, 200, seed=length):
        *prompt, answer, end = words
        assert (answer, end) == (solve(prompt), "<eos>")
        assert counted == [len(prompt)]
        lengths.add(len(prompt) - 2)
    assert lengths == (set(range(1, length + 1)) if mixed else {length})


def test_bits_and_answers_are_drawn_evenly() -> None:
    drawn = list(read(Parity(mixed=False), 9, 4000, seed=0))
    assert_even((words[1] for words, _ in drawn), ["0", "1"])
    assert_even((words[-2] for words, _ in drawn), ["0", "1"])


def test_the_example_of_the_docstring_is_right() -> None:
    ((prompt, answer),) = re.findall(r"^    (<bos>.+) -> (\S+)$", tra.tasks.parity.__doc__, re.MULTILINE)
    assert solve(prompt.split()) == answer


def test_evaluation_set_is_fixed_by_name_and_length() -> None:
    (batch,) = Parity().evaluation_batches(Evaluation("parity", 8, 2), 2)
    torch.manual_seed(5)
    (again,) = Parity().evaluation_batches(Evaluation("parity", 8, 2), 2)
    assert torch.equal(batch.tokens, again.tokens)
    # Published figures name these sets: if this fails, raise the task's version.
    assert Parity().text(batch.tokens[0]) == "<bos> 1 1 0 0 1 0 0 0 <sep> 1 <eos>"


def test_there_are_two_symbols() -> None:
    with pytest.raises(ValueError, match="alphabet must be 2 for parity, got 3"):
        Parity(3)

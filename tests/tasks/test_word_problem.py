"""Word problems against permutations that are applied to things one after another."""

import re

import pytest

import tra.tasks.word_problem
from tests.tasks.reading import assert_even, read
from tra.tasks import Evaluation, WordProblem
from tra.tasks.word_problem import GENERATORS, Group

ORDER: dict[Group, int] = {"S3": 6, "S4": 24, "A5": 60, "S5": 120}


def solve(prompt: list[str]) -> str:
    assert (prompt[0], prompt[-1]) == ("<bos>", "<sep>")
    moved = list(range(1, len(prompt[1]) + 1))
    for letter in prompt[1:-1]:
        moved = [int(letter[place - 1]) for place in moved]
    return "".join(map(str, moved))


@pytest.mark.parametrize("group", GENERATORS)
@pytest.mark.parametrize("length", [1, 2, 30])
def test_solver_gets_every_sample_right(group: Group, length: int) -> None:
    for alphabet, mixed in ((2, True), (ORDER[group], False)):
        lengths, letters = set(), set()
        for words, counted in read(WordProblem(alphabet, mixed, group), length, 200, seed=length):
            *prompt, answer, end = words
            assert (answer, end) == (solve(prompt), "<eos>")
            assert counted == [len(prompt)]
            lengths.add(len(prompt) - 2)
            letters.update(prompt[1:-1])
        assert lengths == (set(range(1, length + 1)) if mixed else {length})
        assert len(letters) <= alphabet


@pytest.mark.parametrize("group", GENERATORS)
def test_a_group_has_its_elements_and_two_of_them_reach_all(group: Group) -> None:
    task = WordProblem(2, group=group)
    assert task.vocabulary == 4 + ORDER[group]
    assert len(set(task.symbols)) == task.vocabulary
    reached = {"".join(map(str, range(1, int(group[1]) + 1)))}
    while True:
        more = reached | {solve(["<bos>", one, letter, "<sep>"]) for one in reached for letter in task.symbols[4:6]}
        if more == reached:
            break
        reached = more
    assert reached == set(task.symbols[4:])


def test_letters_and_products_are_drawn_evenly() -> None:
    drawn = [words for words, _ in read(WordProblem(6, False, "S3"), 5, 4000, seed=0)]
    symbols = WordProblem(6, group="S3").symbols[4:]
    assert_even((words[1] for words in drawn), symbols)
    assert_even((words[-2] for words in drawn), symbols)


def test_the_example_of_the_docstring_is_right() -> None:
    ((prompt, answer),) = re.findall(r"^    (<bos>.+) -> (\S+)$", tra.tasks.word_problem.__doc__ or "", re.MULTILINE)
    assert solve(prompt.split()) == answer


def test_evaluation_set_is_fixed_by_name_and_length() -> None:
    (batch,) = WordProblem().evaluation_batches(Evaluation("product", 3, 2), 2)
    # Published figures name these sets: if this fails, raise the task's version.
    assert WordProblem().text(batch.tokens[0]) == "<bos> 34215 45231 41235 <sep> 12534 <eos>"


def test_wrong_argument_is_named() -> None:
    with pytest.raises(ValueError, match=r"group must be one of .*, got 'S6'"):
        WordProblem(group="S6")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alphabet must be between 2 and the 60 elements of A5, got 120"):
        WordProblem(group="A5")

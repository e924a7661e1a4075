import re

import pytest
import torch

import tra.tasks.passkey
from tests.tasks.reading import assert_even
from tra.tasks import Evaluation, Passkey


def solve(prompt: list[str]) -> list[str]:
    assert prompt[-1] == "<ask>"
    place = prompt.index("<key>")
    return prompt[place + 1 : place + 4]


def draw(length: int, batch: int = 200, seed: int = 0, noise: int = 100) -> list[list[str]]:
    task = Passkey(noise)
    sample = task.sample(torch.Generator().manual_seed(seed), batch, length)
    assert sample.tokens.shape == sample.counted.shape == (batch, length)
    assert (sample.counted == (torch.arange(length) >= length - 3)).all()
    return [[task.symbols[token] for token in tokens] for tokens in sample.tokens.tolist()]


@pytest.mark.parametrize("length", [8, 9, 64, 300])
def test_solver_gets_every_sample_right(length: int) -> None:
    for words in draw(length):
        assert solve(words[:-3]) == words[-3:]
        assert words.count("<key>") == words.count("<ask>") == 1
        assert len(set(words[-3:])) == 3
        assert sum(word.startswith("d") for word in words) == 6
        assert sum(word.startswith("n") for word in words) == length - 8


def test_the_key_stands_anywhere_and_has_any_digits() -> None:
    drawn = draw(18, 4000, noise=7)
    assert_even((words.index("<key>") for words in drawn), range(11))
    for place in (-3, -2, -1):
        assert_even((words[place] for words in drawn), [f"d{index}" for index in range(10)])
    assert_even(
        (word for words in drawn for word in words if word.startswith("n")), [f"n{index}" for index in range(7)]
    )


def test_the_example_of_the_docstring_is_right() -> None:
    ((prompt, answer),) = re.findall(r"^    (n.+) -> (d.+)$", tra.tasks.passkey.__doc__, re.MULTILINE)
    assert solve(prompt.split()) == answer.split()


def test_evaluation_set_is_fixed_by_name_and_length() -> None:
    (batch,) = Passkey().evaluation_batches(Evaluation("passkey", 12, 2), 2)
    # Published figures name these sets: if this fails, raise the task's version.
    assert Passkey().text(batch.tokens[0]) == "n1 n72 n75 n57 <key> d5 d2 d4 <ask> d5 d2 d4"


def test_wrong_argument_is_named() -> None:
    with pytest.raises(ValueError, match="noise must be at least 1, got 0"):
        Passkey(0)
    with pytest.raises(ValueError, match="length must be at least 8 tokens for passkey, got 7"):
        draw(7)

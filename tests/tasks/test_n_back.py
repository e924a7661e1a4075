import re

import pytest
import torch

import tra.tasks.n_back
from tests.tasks.reading import assert_even
from tra.tasks import Evaluation, NBack


def solve(symbols: list[str], back: int) -> list[str]:
    return [symbols[place - back] if place >= back else "." for place in range(len(symbols))]


@pytest.mark.parametrize("length, alphabet, back", [(3, 2, 2), (9, 32, 2), (50, 7, 1), (40, 5, 13)])
def test_solver_gets_every_sample_right(length: int, alphabet: int, back: int) -> None:
    task = NBack(alphabet, back)
    sample = task.sample(torch.Generator().manual_seed(length), 200, length)
    assert sample.tokens.shape == sample.counted.shape == (200, 2 * length)
    for tokens, counted in zip(sample.tokens, sample.counted.tolist(), strict=True):
        words = task.text(tokens).split()
        assert words[1::2] == solve(words[::2], back)
        assert "." not in words[::2]
        assert [place for place, counts in enumerate(counted) if counts] == list(range(2 * back + 1, 2 * length, 2))


def test_symbols_are_drawn_evenly() -> None:
    tokens = NBack(12).sample(torch.Generator().manual_seed(0), 1000, 4).tokens[:, ::2]
    assert_even(tokens.flatten().tolist(), range(1, 13))


def test_the_example_of_the_docstring_is_right() -> None:
    (example,) = re.findall(r"^    (s.+)$", tra.tasks.n_back.__doc__ or "", re.MULTILINE)
    words = example.replace("-> ", "").split()
    assert words[1::2] == solve(words[::2], 2)


def test_evaluation_set_is_fixed_by_name_and_length() -> None:
    (batch,) = NBack().evaluation_batches(Evaluation("n_back", 5, 2), 2)
    # Published figures name these sets: if this fails, raise the task's version.
    assert NBack().text(batch.tokens[0]) == "s4 . s5 . s20 s4 s6 s5 s2 s20"


def test_wrong_argument_is_named() -> None:
    with pytest.raises(ValueError, match="alphabet must be at least 2, got 1"):
        NBack(1)
    with pytest.raises(ValueError, match="back must be at least 1, got 0"):
        NBack(back=0)
    with pytest.raises(ValueError, match="length must be more than 2 symbols for 2-back, got 2"):
        NBack().sample(torch.Generator(), 1, 2)

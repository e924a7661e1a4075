"""Windows of a text: those to train on, those to be measured on, and recipes that name a text."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from tests.text.reading import prose, write_folder
from tra.model import DecoderConfig
from tra.recipes import Evaluation, Recipe
from tra.tasks import Perplexity, ReadsText, Task, build_task
from tra.text import Text, Tokens


def task_of(folder: Path, tokens: Sequence[int]) -> Text:
    """A task whose every split is these tokens."""
    path = folder / "some.tokens"
    numpy.array(tokens, dtype="uint16").tofile(path)
    task = Text("nowhere", None, "bpe-300")
    task._splits = dict.fromkeys(("train", "valid", "test"), Tokens(path, len(tokens), 3, 17, "uint16"))
    return task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "text", prose(1, 900), prose(2, 300), prose(3, 200))


def test_windows_to_train_on_begin_anywhere_and_count_all_but_the_first_token(tmp_path: Path) -> None:
    task = task_of(tmp_path, range(40))
    batch = task.sample(torch.Generator().manual_seed(0), 2000, 7)
    assert batch.tokens.dtype == torch.int64
    assert batch.tokens.shape == batch.counted.shape == (2000, 8)
    assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(8))
    starts = batch.tokens[:, 0].bincount(minlength=33)
    assert len(starts) == 33  # the last of which ends with the text
    assert all(abs(count - 2000 / 33) < 4 * math.sqrt(2000 / 33) for count in starts.tolist())
    assert batch.counted.tolist() == [[False] + [True] * 7] * 2000


def test_windows_to_train_on_depend_on_the_generator_alone(tmp_path: Path) -> None:
    task = task_of(tmp_path, range(500))
    first = task.sample(torch.Generator().manual_seed(3), 5, 21).tokens
    torch.manual_seed(99)
    again = task_of(tmp_path, range(500)).sample(torch.Generator().manual_seed(3), 5, 21).tokens
    assert torch.equal(first, again)
    assert not torch.equal(first, task.sample(torch.Generator().manual_seed(4), 5, 21).tokens)


def test_a_window_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    task = task_of(tmp_path, range(40))
    assert task.sample(torch.Generator(), 3, 39).tokens.tolist() == [list(range(40))] * 3
    with pytest.raises(ValueError, match="length must be less than the 40 tokens of nowhere, got 40"):
        task.sample(torch.Generator(), 3, 40)


def predictions(task: Text, length: int, examples: int | None, batch: int, stride: int | None) -> list[tuple[int, int]]:
    """Each token that is predicted, and how many stand before it. Token i of the text is i."""
    found = []
    for part in task.evaluation_batches(Evaluation("valid", length, examples, stride), batch):
        assert 1 <= len(part) <= batch
        assert 2 <= part.tokens.shape[1] <= length + 1
        assert torch.equal(part.tokens, part.tokens[:, :1] + torch.arange(part.tokens.shape[1]))
        assert not part.counted[:, 0].any()
        places = part.counted.nonzero().tolist()
        found += [(int(part.tokens[row, column]), column) for row, column in places]
    return found


def test_windows_side_by_side_predict_every_token_but_the_first_once(tmp_path: Path) -> None:
    """Each with what stands before it in its own window."""
    for count, length, batch in [(2, 1, 1), (2, 9, 4), (40, 7, 3), (43, 7, 3), (36, 7, 99), (36, 35, 2), (50, 49, 1)]:
        found = predictions(task_of(tmp_path, range(count)), length, None, batch, None)
        assert found == [(token, (token - 1) % length + 1) for token in range(1, count)]


def test_sliding_windows_predict_every_token_but_the_first_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    cases = [(40, 8, 8), (40, 8, 1), (40, 8, 3), (9, 8, 5), (8, 8, 5), (2, 8, 1), (10, 8, 8)]
    for _ in range(100):
        length = rng.randint(1, 20)
        cases.append((rng.randint(2, 70), length, rng.randint(1, length)))
    for count, length, stride in cases:
        found = predictions(task_of(tmp_path, range(count)), length, None, rng.randint(1, 5), stride)
        assert [token for token, _ in found] == list(range(1, count))
        for token, before in found:
            if token <= length:
                assert before == token  # the first window: all there is
            else:
                assert before > length - stride
                assert before <= length


def test_a_stride_of_one_gives_every_token_a_whole_window(tmp_path: Path) -> None:
    found = predictions(task_of(tmp_path, range(30)), 6, None, 4, 1)
    assert [before for _, before in found] == [1, 2, 3, 4, 5] + [6] * 24


def test_a_stride_as_long_as_the_window_differs_only_in_the_last_one(tmp_path: Path) -> None:
    task = task_of(tmp_path, range(30))
    assert predictions(task, 6, None, 2, 6)[:24] == predictions(task, 6, None, 2, None)[:24]
    assert [before for _, before in predictions(task, 6, None, 2, 6)[24:]] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("stride", [None, 2])
def test_examples_are_so_many_windows_side_by_side(tmp_path: Path, stride: int | None) -> None:
    task = task_of(tmp_path, range(50))
    for examples, last in [(1, 7), (3, 21), (7, 49), (8, 49)]:
        assert [token for token, _ in predictions(task, 7, examples, 2, stride)] == list(range(1, last + 1))


def test_windows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    task = task_of(tmp_path, range(100))
    for stride in (None, 3):
        assert len({tuple(predictions(task, 9, None, batch, stride)) for batch in (1, 2, 5, 50)}) == 1


def test_words_and_bytes_are_those_of_what_is_read(folder: Path) -> None:
    task, text = Text(str(folder), None, "bpe-270"), (folder / "valid.txt").read_text()
    assert task.extent(Evaluation("valid", 16, None)) == (len(text.split()), len(text.encode()))
    beginning = task.tokenizer.decode(task.tokens("valid").read()[: 5 * 16 + 1].tolist())
    assert text.startswith(beginning)
    assert task.extent(Evaluation("valid", 16, 5)) == (len(beginning.split()), len(beginning.encode()))
    assert task.extent(Evaluation("valid", 16, 5))[1] < len(text) / 3
    assert task.extent(Evaluation("valid", 16, 10**6)) == task.extent(Evaluation("valid", 16, None))


def test_train_and_evaluation_may_be_different_texts_with_one_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", "", "unlike anything before\n", "und ganz andere Wörter\n")
    task = Text(str(folder), str(other), "bpe-400")
    assert task.tokenizer.to_str() == Text(str(folder), None, "bpe-400").tokenizer.to_str()
    assert task.text(torch.from_numpy(task.tokens("valid").read()[:].astype("int64"))) == "unlike anything before\n"
    assert task.text(torch.from_numpy(task.tokens("test").read()[:].astype("int64"))) == "und ganz andere Wörter\n"
    assert task.tokens("train").bytes == (folder / "train.txt").stat().st_size
    assert task.vocabulary == len(task.symbols) == 400


@pytest.mark.parametrize(
    "name, length, examples, stride, message",
    [
        ("train", 8, None, None, "evaluation set must be one of test, valid, got 'train'"),
        ("valld", 8, None, None, "evaluation set must be one of test, valid, got 'valld'; did you mean 'valid'"),
        ("valid", 8, 0, None, "examples must be at least 1, got 0"),
        ("valid", 0, None, None, "length must be at least 1, got 0"),
        ("valid", -3, None, None, "length must be at least 1, got -3"),
        ("valid", 8, None, 0, "stride must be between 1 and the window of 8, got 0"),
        ("valid", 8, None, 9, "stride must be between 1 and the window of 8, got 9"),
    ],
)
def test_wrong_evaluation_is_named(
    name: str, length: int, examples: int | None, stride: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        next(task_of(tmp_path, range(40)).evaluation_batches(Evaluation(name, length, examples, stride), 1))


def test_a_text_of_one_token_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text must have at least 2 tokens to predict one, but test of nowhere"):
        next(task_of(tmp_path, [7]).evaluation_batches(Evaluation("test", 8, None), 1))


TINY = Recipe(
    name="tiny-text",
    model=DecoderConfig(vocabulary=300, layers=1, heads=2, width=16),
    task="text",
    task_options={"train": "nowhere", "tokenizer": "bpe-300"},
    length=16,
    steps=3,
    batch=2,
    learning_rate=1e-3,
    evaluations=(Evaluation("valid", 16, 4), Evaluation("test", 32, None, 8)),
)


def test_a_recipe_reads_no_text_and_comes_back_from_json() -> None:
    assert Recipe.from_json(TINY.to_json()) == TINY
    assert TINY.build_task().measure is Perplexity


def test_text_reads_text_and_no_other_task_claims_to() -> None:
    assert isinstance(build_task("text"), ReadsText)
    assert build_task("text").texts() == ("wikitext-103", "wikitext-103")
    assert build_task("text", {"train": "wikitext-2", "evaluation": "wikitext-103"}).texts()[1] == "wikitext-103"
    assert not isinstance(build_task("flip_flop"), ReadsText)
    assert not any(hasattr(Task, name) for name in ("tokenizer", "read", "texts", "with_tokenizer"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": replace(TINY.model, vocabulary=299)}, "model.vocabulary must be at least 300 for text, got 299"),
        ({"length": 100_000}, r"length must be less than the \d,\d+ tokens of .*, got 100000"),
    ],
)
def test_what_a_text_cannot_have_is_refused_once_it_is_read(
    changes: dict[str, object], message: str, folder: Path
) -> None:
    def prepare(recipe: Recipe) -> None:
        recipe.build_task().prepare(recipe.model.vocabulary, recipe.length, recipe.evaluations)

    recipe = TINY.changed({"task_options": {"train": str(folder), "tokenizer": "bpe-300"}})
    prepare(recipe)
    with pytest.raises(ValueError, match=message):
        prepare(replace(recipe, **changes))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (Evaluation("dev", 16, 4), "evaluation set must be one of test, valid, got 'dev'"),
        (Evaluation("valid", 16, 4, stride=17), "stride must be between 1 and the window of 16"),
        (Evaluation("valid", 0, 4), "length must be at least 1, got 0"),
    ],
)
def test_a_wrong_evaluation_is_refused_before_anything_is_read(wrong: Evaluation, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, evaluations=(Evaluation("valid", 16, 4), wrong))


def test_lengths_that_a_recipe_does_not_name_read_as_much_as_those_it_does(tmp_path: Path) -> None:
    task = task_of(tmp_path, range(40))
    usual = (Evaluation("valid", 16, 8), Evaluation("valid", 64, 2), Evaluation("valid", 32, None))
    assert [task.usual_examples(usual, "valid", length) for length in (16, 21, 64, 1000)] == [8, 6, 2, 1]
    assert task.usual_examples(usual[2:], "valid", 16) is None


def test_a_run_of_another_length_is_measured_on_the_same_tokens_from_that_length_on() -> None:
    usual = replace(
        TINY,
        length=128,
        evaluations=(
            Evaluation("valid", 128, 1024),
            Evaluation("valid", 4096, 32),
            Evaluation("valid", 1024, None, 512),
        ),
    )
    measured = usual.adjusted({"length": 48}).evaluations
    assert measured == (
        Evaluation("valid", 48, 2730),
        Evaluation("valid", 1536, 85),
        Evaluation("valid", 384, None, 192),
    )
    assert usual.adjusted({"length": 128}) == usual

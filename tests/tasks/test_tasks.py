"""What holds for every task: its options, its evaluation sets, and what it refuses."""

from fractions import Fraction

import pytest
import torch

from tra.recipes import build_recipe
from tra.tasks import TASKS, Evaluation, build_task, task_options
from tra.tasks.base import USUAL_EXAMPLES, seed_of, seeded

SYNTHETIC = [name for name in TASKS if name != "text"]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_the_name_it_is_found_by(name: str) -> None:
    assert build_task(name).name == name
    assert build_task(name, {}).unit in ("tokens", "symbols")


def test_options_are_those_of_the_signature() -> None:
    assert list(task_options(TASKS["flip_flop"])) == ["ignore"]
    assert list(task_options(TASKS["copy_unique"])) == ["alphabet", "mixed"]
    assert list(task_options(TASKS["text"])) == ["train", "evaluation", "tokenizer"]
    assert build_task("copy_repeat", {"alphabet": 7}).vocabulary == 11
    assert build_task("flip_flop", {"ignore": 1}).ignore == 1.0


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("flipflop", {}, "task must be one of .*, got 'flipflop'; did you mean 'flip_flop'"),
        (
            "copy_unique",
            {"alphabett": 40},
            "task_options of copy_unique must be among alphabet, mixed, got 'alphabett'; did you mean 'alphabet'",
        ),
        ("copy_unique", {"alphabet": "forty"}, "alphabet in task_options of copy_unique must be a whole number, got"),
        ("copy_unique", {"alphabet": 4.0}, "alphabet in task_options of copy_unique must be a whole number, got 4.0"),
        ("copy_unique", {"alphabet": True}, "alphabet in task_options of copy_unique must be a whole number, got True"),
        ("copy_unique", {"mixed": 1}, "mixed in task_options of copy_unique must be True or False, got 1"),
        ("copy_unique", {"alphabet": 1}, "alphabet must be at least 2, got 1"),
        ("flip_flop", {"ignore": "often"}, "ignore in task_options of flip_flop must be a finite number, got 'often'"),
        ("text", {"tokeniser": "gpt2"}, "task_options of text must be .*, got 'tokeniser'; did you mean 'tokenizer'"),
        ("text", {"evaluation": 3}, "evaluation in task_options of text must be a string or None, got 3"),
        ("copy_unique", ["alphabet"], r"task_options must be a dict of options, got \['alphabet'\]"),
    ],
)
def test_a_wrong_name_or_option_is_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_task(name, options)


@pytest.mark.parametrize("options", [{"alphabett": 40}, {"alphabet": "40"}, ["alphabet"]])
def test_a_recipe_with_a_wrong_option_is_not_made(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="task_options"):
        build_recipe("copy-unique-small").changed({"task_options": options})


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_stride_is_for_texts_alone(name: str) -> None:
    task = build_task(name)
    for set_name in task.evaluation_sets():
        with pytest.raises(ValueError, match=f"stride must be None for {name}, which is no text, got 4"):
            next(task.evaluation_batches(Evaluation(set_name, 16, 4, stride=4), 1))


@pytest.mark.parametrize("name", SYNTHETIC)
def test_what_cannot_be_sampled_or_measured_is_refused(name: str) -> None:
    task = build_task(name)
    known = next(iter(task.evaluation_sets()))
    task.check(task.vocabulary, 8, [Evaluation(known, 8, 3)])
    with pytest.raises(ValueError, match=f"model.vocabulary must be at least {task.vocabulary} for {name}, got 5"):
        task.check(5, 8, [])
    with pytest.raises(ValueError, match="length must be"):
        task.check(task.vocabulary, -1, [])
    with pytest.raises(ValueError, match="evaluation set must be one of"):
        task.check(task.vocabulary, 8, [Evaluation(known, 8, 3), Evaluation("unknown", 8, 3)])
    for wrong in (0, None):
        with pytest.raises(ValueError, match=f"examples must be at least 1, got {wrong}"):
            task.check(task.vocabulary, 8, [Evaluation(known, 8, wrong)])


@pytest.mark.parametrize("name", [name for name in SYNTHETIC if name != "flip_flop"])
def test_a_task_without_a_published_copy_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"data must be 'fresh' or 'fixed': there is no published copy of {name}"):
        build_task(name).published("train")


@pytest.mark.parametrize("name", SYNTHETIC)
def test_no_training_sequence_has_more_tokens_than_the_task_says(name: str) -> None:
    task = build_task(name)
    assert task.sample(torch.Generator().manual_seed(1), 200, 8).tokens.shape[1] == task.tokens_in(8)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_example_of_a_length_is_always_the_same(name: str) -> None:
    tokens, symbols = build_task(name).example(8)
    torch.manual_seed(5)
    again, _ = build_task(name).example(8)
    assert torch.equal(tokens, again)
    assert symbols == [build_task(name).symbols[token] for token in tokens]
    assert len({tuple(build_task(name).example(8, seed)[1]) for seed in range(20)}) > 10


def test_sets_that_a_recipe_names_have_its_number_of_sequences_and_others_the_usual() -> None:
    task, usual = build_task("flip_flop"), (Evaluation("iid", 64, 31), Evaluation("sparse", 64, 7))
    assert task.usual_examples(usual, "iid", 64) == 31
    assert task.usual_examples(usual, "sparse", 64) == 7
    assert task.usual_examples(usual, "iid", 128) == USUAL_EXAMPLES


def test_an_evaluation_at_another_length_keeps_its_sequences() -> None:
    task = build_task("copy_unique")
    assert task.rescaled(Evaluation("copy", 32, 77), Fraction(3, 8)) == Evaluation("copy", 12, 77)
    assert task.rescaled(Evaluation("copy", 2, 77), Fraction(1, 8)) == Evaluation("copy", 1, 77)


def test_seeds_depend_on_every_part_of_the_key() -> None:
    keys = [("train", 0, 1), ("train", 1, 0), ("train", 0), ("train", "0", 1), ("order", 0, 1)]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    assert seed_of("weights", 0) == 5543443259633724587  # every run began from it
    assert torch.equal(torch.rand(3, generator=seeded("a", 1)), torch.rand(3, generator=seeded("a", 1)))

"""Training on text: windows by seed and step, exact resume after a kill, and the commands around it."""

import hashlib
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.runs.tiny import begin, finish, launched, logged, started, wait_for
from tests.text.reading import prose, write_folder
from tra.cli import main
from tra.model import Decoder, DecoderConfig
from tra.progress import shown
from tra.recipes import Evaluation, Recipe
from tra.runs import evaluate, load_run, train
from tra.runs.batches import training_batches
from tra.runs.evaluation import measure
from tra.runs.step import summed_loss
from tra.tasks import Batch
from tra.text import Source, Text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tokenizers and tokens go to a folder of the test's own, and names are not looked for anywhere else."""
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRA_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "text", prose(1, 900), prose(2, 300), prose(3, 200))


@pytest.fixture
def recipe(folder: Path) -> Recipe:
    """Dropout is on, so that an exact resume has to get the random numbers right too."""
    return Recipe(
        name="tiny-text",
        model=DecoderConfig(vocabulary=300, layers=1, heads=2, width=16, dropout=0.1),
        task="text",
        task_options={"train": str(folder), "tokenizer": "bpe-300"},
        length=16,
        steps=40,
        batch=4,
        learning_rate=1e-3,
        log_every=1,
        checkpoint_every=4,
        evaluations=(Evaluation("valid", 16, 4), Evaluation("valid", 32, 4, 8)),
    )


def test_windows_depend_on_seed_and_step_alone(recipe: Recipe, folder: Path) -> None:
    def batches_of(recipe: Recipe) -> Callable[[int], Batch]:
        return training_batches(recipe, recipe.build_task())

    batches = batches_of(recipe)
    assert not torch.equal(batches(0).tokens, batches(1).tokens)
    assert torch.equal(batches_of(replace(recipe, steps=9, learning_rate=0.1))(7).tokens, batches(7).tokens)
    assert not torch.equal(batches_of(replace(recipe, seed=1))(7).tokens, batches(7).tokens)
    ids = Text(str(folder), None, "bpe-300").tokens("train").read().tolist()
    windows = {tuple(ids[start : start + 17]) for start in range(len(ids) - 16)}
    assert {tuple(row) for step in range(20) for row in batches(step).tokens.tolist()} <= windows


def test_each_split_is_read_no_more_often_than_it_must_be(
    recipe: Recipe, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    digest = hashlib.file_digest

    def file_digest(file: object, kind: str) -> object:
        if Path(file.name).parent == folder:
            hashed.append(Path(file.name).name)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    run = train(replace(recipe, steps=2), tmp_path / "run")
    assert len(run.results) == 2
    # Once to name the tokenizer and the tokens, and once more after each of them was made: the text must be the same.
    assert sorted(hashed) == ["train.txt"] * 3 + ["valid.txt"] * 2
    hashed.clear()
    train(replace(recipe, steps=2), tmp_path / "again")
    assert sorted(hashed) == ["train.txt", "valid.txt"]


def test_a_stored_run_needs_neither_the_training_text_nor_new_tokens(
    recipe: Recipe, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is stored with it, and gives the tokens that are there already."""
    trained = train(replace(recipe, steps=2), tmp_path / "run")
    (folder / "train.txt").unlink()
    monkeypatch.setattr(Source, "pieces", None)
    run = load_run(tmp_path / "run")
    assert run.task.tokenizer.to_str() == trained.task.tokenizer.to_str()
    assert evaluate(run) == trained.results


def test_another_text_under_the_same_name_is_refused(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    train(replace(recipe, steps=2), tmp_path / "run")
    (folder / "train.txt").write_text("other words altogether\n" * 99)
    with pytest.raises(ValueError, match=r"text must be that on which the run in .* began: it gives another tokenizer"):
        train(replace(recipe, steps=2), tmp_path / "run")


def test_own_files_that_say_no_split_are_divided_and_trained_on(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "story.txt").write_text(prose(1, 3000))
    options = {"train": str(own), "tokenizer": "bpe-300"}
    with shown():
        run = train(replace(recipe, steps=2, task_options=options), tmp_path / "run")
    assert capsys.readouterr().out.count(f"no file in {own} says train, valid or test in its name") == 1
    assert [result.tokens for result in run.results] == [64, 128]


def test_the_loss_of_text_is_that_of_every_token_but_the_first() -> None:
    """Written out, and as it is where not all tokens count."""
    model = Decoder(DecoderConfig(vocabulary=50, layers=1, heads=2, width=16, dropout=0.0))
    tokens = torch.randint(50, (3, 13))
    counted = torch.ones(3, 13, dtype=torch.bool)
    counted[:, 0] = False
    loss = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(summed_loss(model, Batch(tokens, counted)), loss.sum())
    counted[1, 5] = False
    torch.testing.assert_close(summed_loss(model, Batch(tokens, counted)), loss.sum() - loss[1, 4])


def test_a_model_learns_the_text_it_is_trained_on(tmp_path: Path, recipe: Recipe) -> None:
    """Of three words that follow each other; what it learned it knows of windows it never saw."""
    write_folder(tmp_path / "three", "ka to mi " * 500, "to mi ka " * 30)
    learned = replace(
        recipe,
        task_options={"train": str(tmp_path / "three"), "tokenizer": "bpe-257"},
        model=replace(recipe.model, vocabulary=257, dropout=0.0),
        steps=60,
        learning_rate=1e-2,
        evaluations=(),
    )
    run, wanted = train(learned, tmp_path / "run"), Evaluation("valid", 16, None)
    assert measure(run.model, run.task, wanted).value < 2.0
    assert measure(Decoder(learned.model), run.task, wanted).value > 200


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": DecoderConfig(vocabulary=299)}, "model.vocabulary must be at least 300 for text, got 299"),
        ({"length": 10**6}, "length must be less than the"),
        ({"evaluations": (Evaluation("dev", 16, 4),)}, "evaluation set must be one of test, valid, got 'dev'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(
    changes: dict[str, object], message: str, recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(replace(recipe, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_killed_run_ends_with_the_same_bits(recipe: Recipe, tmp_path: Path, cache: Path) -> None:
    """SIGKILL while tokens are made and while a checkpoint is written, then on to the end."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run in (whole, killed):
        begin(recipe, run)
    moments = [
        lambda: list(cache.glob(".*.partial")) or list(cache.glob("*.tokens")),
        lambda: all(list((killed / "checkpoints").glob(name)) for name in ("step-????????", "*.partial")),
    ]
    for moment in moments:
        process = started(killed)
        wait_for(moment, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert "going on from" in finish(killed)
    assert not list(cache.glob(".*.partial"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes
    try:
        assert main(["train", "--resume", str(whole)]) == 0
    finally:
        torch.set_num_threads(threads)
    steps = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))
    assert logged(killed) == logged(whole)
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = Path("checkpoints") / "step-00000040" / name
        assert (killed / last).read_bytes() == (whole / last).read_bytes()
    results = [json.loads((run / "results.json").read_text())["results"] for run in (killed, whole)]
    assert results[0] == results[1]
    assert [(result["length"], result["stride"]) for result in results[0]] == [(16, None), (32, 8)]


def test_two_processes_make_the_tokens_once_and_give_the_weights_of_one(recipe: Recipe, tmp_path: Path) -> None:
    recipe = replace(recipe, model=replace(recipe.model, dropout=0.0), steps=6, checkpoint_every=6)
    begin(recipe, tmp_path / "two")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launched(torchrun, "-m", "tra", "train", "--resume", str(tmp_path / "two"))
    train(recipe, tmp_path / "one")
    two, one = (
        load_file(tmp_path / run / "checkpoints" / "step-00000006" / "model.safetensors") for run in ("two", "one")
    )
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    assert len(list(Path(os.environ["TRA_CACHE"]).glob("train-*.tokens"))) == 1
    assert json.loads((tmp_path / "two" / "results.json").read_text())["step"] == 6


def test_a_text_has_no_published_copy(language_run: Path, recipe: Recipe, tmp_path: Path) -> None:
    for attempt in (
        lambda: evaluate(language_run, data="hub"),
        lambda: train(replace(recipe, data="hub"), tmp_path / "run"),
    ):
        with pytest.raises(ValueError, match="data must be 'fresh' or 'fixed': there is no published copy of text"):
            attempt()
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_all_lengths_are_measured_on_the_same_tokens(language_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many as the recipe reads, 8 windows of 16, whether it names the length or not."""
    for options, lengths in ((["--lengths", "16", "64", "4"], [16, 64, 4]), (["--stride", "16"], [16, 32])):
        assert main(["evaluate", str(language_run), *options, "--json"]) == 0
        measured = json.loads(capsys.readouterr().out)["results"]
        assert [entry["length"] for entry in measured] == lengths
        assert {(entry["tokens"], entry["bytes"]) for entry in measured} == {(128, measured[0]["bytes"])}


RUN = Path("runs/wikitext103-small-tra-0")


@pytest.fixture(scope="module")
def trained_by_command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a command trained the small recipe on a folder; it is measured on other text, which is looked for under its
    name in $TRA_DATA."""
    place = tmp_path_factory.mktemp("command")
    folder = write_folder(place / "text", prose(1, 900), prose(2, 300), prose(3, 200))
    write_folder(place / "data" / "wikitext-103", "", prose(7, 3000))
    model = ["--model.vocabulary", "300", "--model.layers", "1", "--model.heads", "2", "--model.width", "16"]
    text = ["--task-options", f"train={folder}", "tokenizer=bpe-300"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRA_DATA", str(place / "data"))
        patch.setenv("TRA_CACHE", str(place / "cache"))
        patch.chdir(place)
        assert (
            main(
                [
                    "train",
                    "wikitext103-small",
                    *text,
                    *model,
                    *["--length", "16", "--steps", "2", "--batch", "3", "--output"],
                    str(RUN),
                ]
            )
            == 0
        )
    return place


@pytest.fixture
def there(trained_by_command: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In that folder, whose results no test may change."""
    monkeypatch.setenv("TRA_DATA", str(trained_by_command / "data"))
    monkeypatch.setenv("TRA_CACHE", str(trained_by_command / "cache"))
    monkeypatch.chdir(trained_by_command)
    return trained_by_command


def test_a_command_trains_on_a_folder_and_measures_on_another(there: Path) -> None:
    stored = json.loads((RUN / "recipe.json").read_text())
    assert stored["task_options"] == {
        "train": str(there / "text"),
        "evaluation": "wikitext-103",
        "tokenizer": "bpe-300",
    }
    content = json.loads((RUN / "results.json").read_text())
    assert (content["task"], content["step"]) == ("text", 2)
    lengths = [(result["length"], result["stride"]) for result in content["results"]]
    assert lengths == [*((16 * times, None) for times in (1, 2, 4, 8, 16, 32)), (16, 8), (128, 64)]
    assert set(content["results"][0]) == {
        *("set", "length", "examples", "stride", "tokens", "words", "bytes", "loss"),
        *("perplexity", "perplexity_per_word", "perplexity_per_byte", "loss_by_position", "windows", "parts"),
    }
    read = (there / "data" / "wikitext-103" / "valid.txt").read_text()
    assert {(result["words"], result["bytes"]) for result in content["results"]} == {(len(read.split()), len(read))}
    assert all(200 < result["perplexity"] < 400 for result in content["results"])


@pytest.mark.usefixtures("there")
def test_a_command_measures_other_windows_and_stores_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = (RUN / "results.json").read_bytes()
    assert main(["evaluate", str(RUN), "--lengths", "16", "48", "--stride", "8", "--examples", "4", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["results"]
    assert [(entry["length"], entry["stride"], entry["tokens"]) for entry in measured] == [(16, 8, 64), (48, 8, 192)]
    assert (RUN / "results.json").read_bytes() == before


def test_a_command_says_what_it_measured(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(RUN), "--lengths", "21", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["results"]
    assert (entry["set"], entry["stride"], entry["examples"]) == ("valid", None, (1 << 17) // 21)
    assert entry["bytes"] == len((there / "data" / "wikitext-103" / "valid.txt").read_text())
    assert main(["evaluate", str(RUN), "--lengths", "21"]) == 0
    said = capsys.readouterr().out
    for field, places in (("perplexity", 2), ("perplexity_per_word", 2), ("perplexity_per_byte", 3)):
        assert f"| tra | {entry[field]:.{places}f} [" in said
    assert re.search(r"tra at +21 tokens, perplexity per token:  valid \d+\.\d{3}\n", said)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--lengths 0", "length must be at least 1, got 0"),
        ("--lengths 8 --stride 9", "stride must be between 1 and the window of 8, got 9"),
        ("--sets test", "text must hold a test split: no file in "),
    ],
)
@pytest.mark.usefixtures("there")
def test_a_window_that_cannot_be_measured_is_one_line(
    wrong: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(RUN), *wrong.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tra: error: {message}")
    assert error.count("\n") == 1

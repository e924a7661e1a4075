"""Text from folders and from the hub, and the pieces it is read in."""

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

import tra.text.source
from tests.text.reading import ODD, odd_text, prose, write_folder
from tra.cli import main
from tra.errors import RunError
from tra.text import Source, load_tokenizer


def text_of(folder: Path, split: str = "train") -> str:
    return "".join(Source(str(folder)).pieces(split))


def write_parquet(path: Path, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize(
    "name, split",
    [
        ("train.txt", "train"),
        ("wiki.train.tokens", "train"),
        ("wiki.train.raw", "train"),
        ("train-00000-of-00002.parquet", "train"),
        ("my_training_text.txt", "train"),
        ("deep/er/Train.TXT", "train"),
        ("wiki.valid.tokens", "valid"),
        ("validation-00000-of-00001.parquet", "valid"),
        ("val.txt", "valid"),
        ("dev.raw", "valid"),
        ("TEST.txt", "test"),
        ("testing_2.tokens", "test"),
        ("latest.txt", "any"),
        ("trainer.txt", "any"),
        ("train.csv", None),
        ("train", None),
        (".train.txt", None),
        (".cache/train.txt", None),
        ("folder.train.txt/", None),
    ],
)
def test_split_is_said_by_the_file_name(tmp_path: Path, name: str, split: str | None) -> None:
    """A text whose files say none has all of them, divided."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if name.endswith("/") else path.touch()
    source = Source(str(tmp_path))
    for other in ("train", "valid", "test"):
        if split in (other, "any"):
            assert source.files(other) == [path]
        else:
            with pytest.raises(ValueError, match=f"text must hold a {other} split: no file in"):
                source.files(other)


def test_every_kind_of_file_gives_the_same_text(tmp_path: Path) -> None:
    text = prose(3, 500) + "a lone\rcarriage return, a\r\nDOS line, ünïcode 😀\n\n\nthe end\n"
    for suffix in ("txt", "tokens", "raw"):
        write_folder(tmp_path / suffix, "").joinpath(f"train.{suffix}").write_bytes(text.encode())
    lines = text.split("\n")[:-1]
    write_parquet(tmp_path / "parquet" / "train.parquet", other=[0] * len(lines), text=lines)
    assert [text_of(tmp_path / kind) for kind in ("txt", "tokens", "raw", "parquet")] == [text] * 4


def test_files_follow_each_other_by_name_and_each_ends_its_line(tmp_path: Path) -> None:
    (tmp_path / "train-2.txt").write_text("third")
    (tmp_path / "train-0.txt").write_text("first")
    (tmp_path / "train-1.txt").write_text("second\n")
    (tmp_path / "train-1-empty.txt").write_text("")
    assert text_of(tmp_path) == "first\nsecond\nthird\n"


def test_rows_are_lines_whether_they_end_in_one_or_not(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", text=["", " = Title = \n", "a document", None, "last"])
    assert text_of(tmp_path) == "\n = Title = \na document\n\nlast\n"


def test_fingerprint_changes_whenever_the_text_does(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "one", "some text\n", "other text\n")

    def fingerprint(split: str = "train", of: Path = folder) -> str:
        return Source(str(of)).fingerprint(split)

    before = fingerprint()
    assert before != fingerprint("valid")
    assert before == fingerprint(of=write_folder(tmp_path / "two", "some text\n"))
    os.utime(folder / "train.txt", (1, 1))
    assert fingerprint() == before
    (folder / "train.txt").write_text("some test\n")
    assert fingerprint() != before
    (folder / "train.txt").write_text("some text\n")
    (folder / "train-2.txt").write_text("more\n")
    assert fingerprint() != before


def test_each_split_is_hashed_once(tmp_path: Path) -> None:
    source = Source(str(write_folder(tmp_path, "some text\n", "other text\n")))
    first = [source.fingerprint(split) for split in ("train", "valid")]
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).unlink()  # it is not asked for again
    assert [source.fingerprint(split) for split in ("train", "valid")] == first


def test_the_folder_of_data_comes_before_a_path_and_both_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Source("wikitext-2").folder is None
    write_folder(tmp_path / "wikitext-2", "here\n")
    assert text_of(Path("wikitext-2")) == "here\n"
    write_folder(tmp_path / "data" / "wikitext-2", "in the folder\n")
    monkeypatch.setenv("TRA_DATA", str(tmp_path / "data"))
    assert text_of(Path("wikitext-2")) == "in the folder\n"
    assert text_of(tmp_path / "wikitext-2") == "here\n"


@pytest.mark.parametrize("name, config", [("wikitext-2", "wikitext-2-raw-v1"), ("wikitext-103", "wikitext-103-raw-v1")])
@pytest.mark.parametrize("split, hub_split", [("train", "train"), ("valid", "validation"), ("test", "test")])
def test_known_names_come_from_the_hub(
    name: str, config: str, split: str, hub_split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, ...]] = []

    def load_dataset(*names: str, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"text": ["", " = Title = \n", "", "words \n"] * 700})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert text_of(Path(name), split) == "\n = Title = \n\nwords \n" * 700
    assert asked == [("Salesforce/wikitext", config, hub_split)]
    splits = {Source(name).fingerprint(other) for other in ("train", "valid", "test")}
    assert len(splits) == 3


def test_a_hub_out_of_reach_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: str, split: str) -> None:
        raise ConnectionError("no way\nthrough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(RunError) as caught:
        text_of(Path("wikitext-103"))
    assert str(caught.value) == (
        "Salesforce/wikitext could not be had from the hub (ConnectionError: no way). Offline, download its files "
        "elsewhere and give their folder, or set TRA_DATA to a folder that holds it as wikitext-103"
    )


def test_a_misspelt_folder_of_data_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRA_DATA", str(tmp_path / "typo"))
    with pytest.raises(ValueError, match=r"TRA_DATA must be a folder, got '.*typo'"):
        Source("wikitext-103")


def test_offline_commands_end_with_one_line_and_code_one(tmp_path: Path) -> None:
    """In a process of its own, whose libraries are told at their import that there is no network."""
    program = (
        "import sys\n"
        "from tra.cli import main\n"
        "for recipe in ('wikitext103-small', 'wikitext103'):\n"
        "    print(main(['train', recipe, '--output', 'run']))\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.stdout == "1\n1\n"
    data, tokenizer = process.stderr.splitlines()
    assert data.startswith("tra: error: Salesforce/wikitext could not be had from the hub (")
    assert data.endswith("give their folder, or set TRA_DATA to a folder that holds it as wikitext-2")
    assert tokenizer.startswith("tra: error: GPT-2's tokenizer could not be had from the hub (")
    assert (
        "give a folder with encoder.json and vocab.bpe, or set TRA_DATA to a folder that holds it as gpt2" in tokenizer
    )
    assert not (tmp_path / "run").exists()


def no_folder(folder: Path) -> None:
    folder.rmdir()


def no_training_split(folder: Path) -> None:
    write_folder(folder, "", "validation\n" * 50)


def not_utf8(folder: Path) -> None:
    (folder / "train.txt").write_bytes(b"fine at first\n" * 100_000 + b"caf\xe9\n")


def no_text_column(folder: Path) -> None:
    write_parquet(folder / "train.parquet", words=["a"], number=[1])


def numbers_as_text(folder: Path) -> None:
    write_parquet(folder / "train.parquet", text=[1, 2])


def lists_as_text(folder: Path) -> None:
    write_parquet(folder / "train.parquet", text=[["a"], ["b"]])


def no_parquet(folder: Path) -> None:
    (folder / "train.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def truncated_parquet(folder: Path) -> None:
    write_parquet(folder / "train.parquet", text=["many words"] * 1000)
    os.truncate(folder / "train.parquet", (folder / "train.parquet").stat().st_size // 2)


def damaged_parquet(folder: Path) -> None:
    """Its end, which says what is in it, is intact."""
    write_parquet(folder / "train.parquet", text=[str(number) for number in range(5000)])
    content = bytearray((folder / "train.parquet").read_bytes())
    content[4:4000] = b"\xff" * 3996
    (folder / "train.parquet").write_bytes(content)


def empty(folder: Path) -> None:
    (folder / "train.txt").touch()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (no_folder, "text must be a folder of .txt, .tokens, .raw, .parquet files or one of wikitext-103, wikitext-2"),
        (
            no_training_split,
            "text must hold a train split: no file in {folder} ends in .txt or .tokens or .raw or .parq",
        ),
        (not_utf8, "text must be UTF-8, but {folder}/train.txt is not: 'utf-8' codec can't decode byte 0xe9"),
        (
            no_text_column,
            "text must be strings in a column called text, but {folder}/train.parquet has words (string),",
        ),
        (numbers_as_text, "text must be strings in a column called text, but {folder}/train.parquet has text (int64)"),
        (lists_as_text, "text must be strings in a column called text, but {folder}/train.parquet has text (list<"),
        (no_parquet, "text must be readable, but {folder}/train.parquet is no intact parquet file: "),
        (truncated_parquet, "text must be readable, but {folder}/train.parquet is no intact parquet file: "),
        (damaged_parquet, "text must be readable, but {folder}/train.parquet is no intact parquet file: "),
        (empty, "text must not be empty, but the train split of {folder} is"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_text_is_one_line_that_says_what_was_expected(
    spoil: Any, message: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "text", tmp_path / "run"
    folder.mkdir()
    spoil(folder)
    text = ["--task-options", f"train={folder}", f"evaluation={folder}", "tokenizer=bpe-300"]
    assert main(["train", "wikitext103-small", *text, "--output", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tra: error: " + message.format(folder=folder))
    assert error.count("\n") == 1
    assert not run.exists()
    assert not list(cache.glob("*.tokens")) + list(cache.glob(".*.partial"))


@pytest.fixture(scope="module")
def gpt2_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With merges for whatever ODD makes likely."""
    folder, rng = tmp_path_factory.mktemp("odd"), random.Random(1)
    write_folder(folder, "".join(odd_text(rng, 200) for _ in range(200)))
    return load_tokenizer("bpe-700", Source(str(folder)), folder)


@pytest.fixture(scope="module")
def gpt4_like() -> Tokenizer:
    """Its pattern joins line breaks to what stands before them."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    tokenizer, rng = Tokenizer(models.BPE()), random.Random(2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((odd_text(rng, 200) for _ in range(200)), trainer)
    return tokenizer


def odd_texts() -> Iterator[tuple[str, int]]:
    """Texts, and sizes of pieces to read them in."""
    rng = random.Random(0)
    for first in ODD:
        for second in (" ", "\n", "\r\n", "\t"):
            yield (first + second) * 9 + (first + second * 2) * 9 + (second + first * 2) * 9, rng.randint(1, 9)
    for _ in range(800):
        yield odd_text(rng, rng.randint(1, 60)), rng.randint(1, 25)


def pieces_of(path: Path, text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(tra.text.source, "PIECE", size)
    (path / "train.txt").write_bytes(text.encode())
    return list(Source(str(path)).pieces("train"))


def test_pieces_have_the_tokens_of_the_whole_text(
    gpt2_like: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = 0
    for text, size in odd_texts():
        pieces = pieces_of(tmp_path, text, size, monkeypatch)
        whole = text if text.endswith("\n") else text + "\n"
        assert "".join(pieces) == whole
        ids = [token for piece in pieces for token in gpt2_like.encode(piece).ids]
        assert ids == gpt2_like.encode(whole).ids, pieces
        cuts += len(pieces) - 1
    assert cuts > 1200


def test_pieces_have_the_tokens_of_the_whole_text_with_newer_patterns_too(
    gpt4_like: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a space before a word, or a word after a line, about every megabyte."""
    monkeypatch.setattr(tra.text.source, "BOUNDARIES", tra.text.source.BOUNDARIES[:1])
    cuts = 0
    for text, size in odd_texts():
        pieces = pieces_of(tmp_path, text, size, monkeypatch)
        ids = [token for piece in pieces for token in gpt4_like.encode(piece).ids]
        assert ids == gpt4_like.encode("".join(pieces)).ids, pieces
        cuts += len(pieces) - 1
    assert cuts > 500


@pytest.mark.parametrize("between", [" ", "\n", "\r\n", "\n\n", "\t", " \n ", "    "])
def test_pieces_are_small_whatever_stands_between_words(
    between: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = pieces_of(tmp_path, f"word{between}" * 2000 + "\n", 100, monkeypatch)
    assert max(map(len, pieces)) < 230
    write_parquet(tmp_path / "train.parquet", text=[f"word{between}" * 40] * 50)
    (tmp_path / "train.txt").unlink()
    assert max(map(len, Source(str(tmp_path)).pieces("train"))) < 500


def test_a_text_without_any_boundary_is_cut_all_the_same_and_searched_in_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = 0

    def search(text: str) -> int:
        nonlocal searched
        searched += len(text)
        return original(text)

    original = tra.text.source._last_boundary
    monkeypatch.setattr(tra.text.source, "_last_boundary", search)
    assert pieces_of(tmp_path, "ACGT" * 5000, 10, monkeypatch) == ["ACGT" * 5000 + "\n"]
    assert searched < 3 * 20_000
    monkeypatch.setattr(tra.text.source, "LONGEST", 300)
    pieces = pieces_of(tmp_path, "ACGT" * 5000, 100, monkeypatch)
    assert "".join(pieces) == "ACGT" * 5000 + "\n"
    assert [len(piece) for piece in pieces] == [300] * 66 + [201]
    assert searched < 6 * 20_000


def test_a_text_without_spaces_is_cut_before_its_punctuation(
    gpt2_like: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    words = ["中文", "字", "abc", "é", "42", "²", "!", "\uff0c", "。", "''", "<|endoftext|>", "」", "...", "'s", "_"]
    for _ in range(200):
        text = "".join(rng.choices(words, k=300)) + "\n"
        pieces = pieces_of(tmp_path, text, 50, monkeypatch)
        assert "".join(pieces) == text
        assert max(map(len, pieces)) < 300
        assert [token for piece in pieces for token in gpt2_like.encode(piece).ids] == gpt2_like.encode(text).ids


def test_a_file_belongs_to_one_split(tmp_path: Path) -> None:
    (tmp_path / "test-train.txt").write_text("words\n")
    for split in ("train", "test"):
        with pytest.raises(ValueError, match=r"one split in each file's name, but .*test-train.txt says"):
            Source(str(tmp_path)).files(split)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, "a beginning\n")
    write_folder(tmp_path / "more", "the rest\n")
    original = os.scandir

    def refused(path: Any = ".") -> Any:
        if str(path).endswith("more"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        with pytest.raises(ValueError, match=f"text must be readable, but {tmp_path}/more is not: Permission denied"):
            Source(str(tmp_path)).files("train")
    assert len(Source(str(tmp_path)).files("train")) == 2


def test_a_file_that_is_gone_is_named_and_hidden_ones_are_left_alone(tmp_path: Path) -> None:
    write_folder(tmp_path, "a text\n")
    write_folder(tmp_path / ".hidden", "no text\n")
    os.mkfifo(tmp_path / "train-pipe.txt")
    assert Source(str(tmp_path)).files("train") == [tmp_path / "train.txt"]
    (tmp_path / "train-2.txt").symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(ValueError, match=f"text must be readable, but {tmp_path}/train-2.txt is not: No such file"):
        Source(str(tmp_path)).files("train")

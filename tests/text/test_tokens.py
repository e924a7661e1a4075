"""Tokens in memory-mapped files: written once, whole or not at all, by one of several processes, in little memory."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from filelock import FileLock
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

import tra.text.source
import tra.text.tokens
from tests.faults import full_disk
from tests.text.reading import DATA, needs_data, odd_text, prose, write_folder
from tra.bench.memory import added_megabytes, measurable
from tra.cli import main
from tra.errors import RunError
from tra.progress import shown
from tra.text import Source, Text, Tokens, load_tokenizer, prepare
from tra.text.tokenizer import size_of


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(str(write_folder(tmp_path / "text", prose(1, 4000), prose(2, 400), prose(3, 300))))


@pytest.fixture
def tokenizer(source: Source, cache: Path) -> Tokenizer:
    return load_tokenizer("bpe-300", source, cache)


def files_of(cache: Path) -> set[str]:
    """What is in the cache, apart from tokenizers and the locks, which stay."""
    return {path.name for path in cache.iterdir() if path.suffix != ".lock" and not path.name.startswith("bpe-")}


def words_of_numbers(vocabulary: int) -> Tokenizer:
    """Reads "17" as token 17."""
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_tokens_are_those_of_the_whole_text_mapped_and_not_loaded(
    source: Source, tokenizer: Tokenizer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source.folder is not None
    odd = random.Random(5)
    with open(source.folder / "train.txt", "a", newline="") as file:
        file.writelines(odd_text(odd, 80) for _ in range(50))
    source = Source(source.name)
    monkeypatch.setattr(tra.text.source, "PIECE", 777)
    for split in ("train", "valid", "test"):
        text = "".join(source.pieces(split))
        tokens = prepare(source, split, tokenizer, cache)
        read = tokens.read()
        assert isinstance(read, numpy.memmap)
        assert read.mode == "r"
        assert read.tolist() == tokenizer.encode(text).ids
        assert (tokens.count, tokens.words, tokens.bytes) == (len(read), len(text.split()), len(text.encode()))
        assert tokens.path.stat().st_size == 2 * tokens.count


@needs_data
@pytest.mark.parametrize("name, split, count", [("wikitext-103", "valid", 249_735), ("wikitext-103", "test", 285_234)])
def test_wikitext_has_the_known_number_of_tokens(
    name: str, split: str, count: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRA_DATA", str(DATA))
    source = Source(name)
    tokens = prepare(source, split, load_tokenizer("gpt2", source, cache), cache)
    assert tokens.count == count
    assert tokens.words == {"valid": 213_886, "test": 241_211}[split]
    assert tokens.bytes == source.files(split)[0].stat().st_size


@needs_data
def test_the_training_articles_have_the_known_number_of_tokens_and_come_back(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two and a half million, which takes a quarter of a minute."""
    monkeypatch.setenv("TRA_DATA", str(DATA))
    source = Source("wikitext-2")
    tokenizer = load_tokenizer("gpt2", source, cache)
    tokens = prepare(source, "train", tokenizer, cache)
    assert tokens.count == 2_448_382
    assert tokens.dtype == "uint16"
    end = tokenizer.decode(tokens.read()[-5000:].tolist(), skip_special_tokens=False)
    assert source.files("train")[0].read_bytes().endswith(end.encode())


@pytest.mark.parametrize("vocabulary, dtype", [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_two_bytes_hold_a_token_wherever_they_can(
    vocabulary: int, dtype: str, source: Source, cache: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "numbers", f"7 {vocabulary - 1} 0 {vocabulary - 2}\n")
    tokens = prepare(Source(str(folder)), "train", words_of_numbers(vocabulary), cache)
    assert tokens.dtype == dtype == str(tokens.read().dtype)
    assert tokens.read().tolist() == [7, vocabulary - 1, 0, vocabulary - 2]
    assert tokens.path.stat().st_size == 4 * numpy.dtype(dtype).itemsize


def test_tokens_are_made_once(
    source: Source, tokenizer: Tokenizer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(source, "train", tokenizer, cache)
    content = first.read().tolist()
    with monkeypatch.context() as patch:
        patch.setattr(Source, "pieces", None)
        again = prepare(Source(source.name), "train", tokenizer, cache)
    assert again == first
    assert files_of(cache) == {first.path.name, first.path.with_suffix(".json").name}
    first.path.unlink()  # to save space, say
    assert prepare(source, "train", tokenizer, cache).read().tolist() == content


def test_tokens_are_named_by_source_tokenizer_and_version(
    source: Source, tokenizer: Tokenizer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(given: Source = source, by: Tokenizer = tokenizer, split: str = "train") -> Path:
        return prepare(given, split, by, cache).path

    original = path()
    assert re.fullmatch(r"train-[0-9a-f]{16}\.tokens", original.name)
    copy = Source(str(write_folder(tmp_path / "copy", prose(1, 4000))))
    changed = Source(str(write_folder(tmp_path / "changed", prose(1, 4001))))
    assert path(copy) == original
    others = [path(changed), path(by=load_tokenizer("bpe-301", source, cache)), path(split="valid")]
    special = Tokenizer.from_str(tokenizer.to_str())
    special.add_tokens(["kato"])
    others.append(path(by=special))
    monkeypatch.setattr(tra.text.tokens, "VERSION", tra.text.tokens.VERSION + 1)
    others.append(path())
    assert len({original, *others}) == 6


# Reads slowly, and writes down what it reads.
PROGRAM = """
import hashlib, sys, time
from pathlib import Path
import tra.text.source
from tra.text import Source, Text

folder, place, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
tra.text.source.PIECE = 2000
original = Source.pieces

def pieces(self, split):
    with open(place / "log", "a") as log:
        log.write(f"{split}\\n")
    for piece in original(self, split):
        time.sleep(seconds)
        yield piece

Source.pieces = pieces
(place / sys.argv[4]).touch()
while not (place / "go").exists():
    time.sleep(0.001)
tokens = Text(folder, None, "bpe-300").tokens("train")
print(tokens.count, hashlib.sha256(tokens.read().tobytes()).hexdigest())
"""


def started(folder: str, place: Path, seconds: float, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder, str(place), str(seconds), name],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_two_processes_one_makes_tokenizer_and_tokens_and_both_read_the_same(
    source: Source, cache: Path, tmp_path: Path
) -> None:
    processes = [started(source.name, tmp_path, 0.02, name) for name in ("first", "second")]
    deadline = time.monotonic() + 60
    while not all((tmp_path / name).exists() for name in ("first", "second")):
        assert time.monotonic() < deadline, [process.communicate() for process in processes]
        time.sleep(0.01)
    (tmp_path / "go").touch()
    (first, error), (second, other_error) = (process.communicate(timeout=60) for process in processes)
    assert (error, other_error) == ("", "")
    assert first == second
    assert (tmp_path / "log").read_text() == "train\ntrain\n"  # once for the tokenizer, once for the tokens
    text = Text(source.name, None, "bpe-300")
    assert first.startswith(f"{text.tokens('train').count} ")
    assert len(files_of(cache)) == 2


def test_a_process_that_waits_for_another_says_so(source: Source, tokenizer: Tokenizer, cache: Path) -> None:
    console = Console(file=io.StringIO(), soft_wrap=True)
    made = prepare(source, "train", tokenizer, cache)
    held = threading.Event()

    def hold() -> None:
        with FileLock(made.path.with_name(f".{made.path.name}.lock")):
            held.set()
            time.sleep(1.5)

    threading.Thread(target=hold).start()
    held.wait()
    with shown(console):
        assert prepare(source, "train", tokenizer, cache) == made
    assert console.file.getvalue() == f"waiting for another process, which makes {made.path}\n"


@pytest.mark.parametrize("largest, dtype", [((1 << 16) - 1, "uint16"), (1 << 16, "uint32"), (70_000, "uint32")])
def test_tokens_fit_however_few_of_the_numbers_are_used(largest: int, dtype: str, source: Source, cache: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"nothing": 0, "the": largest}, unk_token="nothing"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert source.folder is not None
    (source.folder / "train.txt").write_text("in the end the rest")
    tokens = prepare(source, "train", tokenizer, cache)
    assert tokens.read().tolist() == [0, largest, 0, largest, 0]
    assert tokens.dtype == dtype
    assert size_of(tokenizer) == largest + 1


def test_killed_in_the_middle_it_leaves_nothing_that_looks_complete(
    source: Source, tokenizer: Tokenizer, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    process = started(source.name, tmp_path, 0.3, "killed")
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 0 for path in cache.glob(".train-*.partial")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (partial,) = files_of(cache)
    assert partial.startswith(".")
    tokens = prepare(source, "train", tokenizer, cache)
    assert tokens.read().tolist() == tokenizer.encode("".join(source.pieces("train"))).ids
    assert files_of(cache) == {tokens.path.name, tokens.path.with_suffix(".json").name}


def test_stopped_between_the_two_files_it_begins_again(
    source: Source, tokenizer: Tokenizer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tra.text.tokens, "write_json", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, "train", tokenizer, cache)
    (alone,) = cache.glob("*.tokens")
    alone.write_bytes(b"what another version may have left")
    tokens = prepare(source, "train", tokenizer, cache)
    assert tokens.path == alone
    assert tokens.read().tolist() == tokenizer.encode("".join(source.pieces("train"))).ids


@pytest.mark.parametrize("missing", [1, 15_000])  # fails when the last are written out, or in the middle
def test_a_full_disk_is_named_with_its_file_and_nothing_is_left(
    missing: int, source: Source, tokenizer: Tokenizer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tra.text.source, "PIECE", 3000)
    size = 2 * len(tokenizer.encode("".join(source.pieces("train"))).ids)
    with full_disk(size - missing), pytest.raises(OSError, match=r"File too large: '.*/train-[0-9a-f]{16}\.tokens'"):
        prepare(source, "train", tokenizer, cache)
    assert files_of(cache) == set()
    with full_disk(size):
        assert prepare(source, "train", tokenizer, cache).count == size / 2


def test_a_full_disk_ends_the_command_with_one_line(
    source: Source, tokenizer: Tokenizer, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["--task-options", f"train={source.name}", f"evaluation={source.name}", "tokenizer=bpe-300"]
    with full_disk(15_000):
        assert main(["train", "wikitext103-small", *text, "--output", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"tra: error: \[Errno 27\] File too large: '.*/train-[0-9a-f]{16}\.tokens'\n", error)


def test_an_unreadable_source_is_named_itself(
    source: Source, tokenizer: Tokenizer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(self: Source, split: str) -> Iterator[str]:
        yield "a beginning\n"
        open("/nowhere/at-all.txt").close()

    monkeypatch.setattr(Source, "pieces", pieces)
    with pytest.raises(FileNotFoundError, match=re.escape("No such file or directory: '/nowhere/at-all.txt'")):
        prepare(source, "valid", tokenizer, cache)
    assert files_of(cache) == set()


@pytest.mark.parametrize(
    "damage",
    [
        {"dtype": "object"},
        {"dtype": "uint32"},
        {"count": 10**30},
        {"count": -5},
        {"count": "many"},
        {"words": None},
        {"more": 1},
        "{",
        "[" * 100_000,
        b"\xff",
        "tokens cut short",
        "no tokens",
    ],
)
def test_a_damaged_cache_is_named_and_made_again(
    source: Source, tokenizer: Tokenizer, cache: Path, damage: dict[str, object] | str | bytes
) -> None:
    made = prepare(source, "train", tokenizer, cache)
    content, facts = made.path.read_bytes(), made.path.with_suffix(".json")
    stored = facts.read_text()
    if isinstance(damage, dict):
        facts.write_text(json.dumps({**json.loads(stored), **damage}))
    elif isinstance(damage, bytes):
        facts.write_bytes(damage)
    elif "tokens" in damage:
        os.truncate(made.path, len(content) - 2 if "short" in damage else 0)
    else:
        facts.write_text(damage)
    console = Console(file=io.StringIO(), soft_wrap=True)
    with shown(console):
        assert prepare(source, "train", tokenizer, cache) == made
    assert f"{made.path} is made again: " in console.file.getvalue()
    assert (made.path.read_bytes(), facts.read_text()) == (content, stored)


def test_a_damaged_tokenizer_in_the_cache_is_named_and_made_again(source: Source, cache: Path) -> None:
    made = load_tokenizer("bpe-300", source, cache).to_str()
    (path,) = cache.glob("bpe-*.json")
    path.write_text(path.read_text()[:-100])
    console = Console(file=io.StringIO(), soft_wrap=True)
    with shown(console):
        assert load_tokenizer("bpe-300", source, cache).to_str() == made
    assert f"{path} is made again: it is no intact tokenizer" in console.file.getvalue()


@pytest.mark.parametrize("what", ["tokenizer", "tokens"])
def test_a_text_that_changes_while_it_is_read_is_not_kept(
    what: str, source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source.folder is not None
    original, file = Source.pieces, source.folder / "train.txt"
    tokenizer = load_tokenizer("bpe-300", source, cache) if what == "tokens" else None
    before = {path.name for path in cache.glob("*-*") if path.suffix != ".lock"}

    def pieces(self: Source, split: str) -> Iterator[str]:
        file.write_text(prose(9, 500))  # after its digest was taken
        yield from original(self, split)

    with monkeypatch.context() as patch:
        patch.setattr(Source, "pieces", pieces)
        with pytest.raises(RunError, match=f"text must not change while it is read, but train of {source.name} did"):
            load_tokenizer("bpe-301", source, cache) if tokenizer is None else prepare(
                source, "train", tokenizer, cache
            )
    assert {path.name for path in cache.glob("*-*") if path.suffix != ".lock"} == before
    again = Source(source.name)
    tokenizer = load_tokenizer("bpe-300", again, cache)
    read = prepare(again, "train", tokenizer, cache).read().tolist()
    assert read == tokenizer.encode(file.read_text()).ids


def test_progress_is_shown(source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source.folder is not None
    (source.folder / "train.txt").write_text("to be or not to be\n" * 120_000)
    monkeypatch.setattr("tra.progress.SECONDS_BETWEEN_LINES", 0.0)
    console = Console(file=io.StringIO(), width=200)
    with shown(console):
        prepare(source, "train", load_tokenizer("bpe-270", source, cache), cache)
    lines = console.file.getvalue().splitlines()
    for what in ("bpe-270", "tokens"):
        for rest in (r"1/2, [\d.e+]+ MB/s, \d+ s left", r"2/2, [\d.e+]+ MB/s"):
            assert any(re.fullmatch(rf"{what} of {source.name}, train: MB {rest}", line) for line in lines)


MEMORY = """
import random, sys
from pathlib import Path
from tra.bench.memory import added_megabytes
from tra.text import Source, load_tokenizer, prepare

folder, cache, rng = Path(sys.argv[1]), Path(sys.argv[2]), random.Random(0)
folder.mkdir()
words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, 12))) for _ in range(2000)]
block = " ".join(rng.choices(words, k=115_000)) + "\\n"
(folder / "train.txt").write_text(block)
tokenizer = load_tokenizer("bpe-3000", Source(str(folder)), cache)
with open(folder / "train.txt", "w") as file:
    for _ in range(8):
        file.write(block)
print(added_megabytes(lambda: prepare(Source(str(folder)), "train", tokenizer, cache)))
"""


@pytest.mark.skipif(not measurable(), reason="peak memory is read from Linux's /proc")
def test_memory_does_not_grow_with_the_text(cache: Path, tmp_path: Path) -> None:
    """Eight megabytes at once would take 1,100."""
    process = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "text"), str(cache)], capture_output=True, text=True, check=False
    )
    assert process.stderr == ""
    assert float(process.stdout) < 100
    (facts,) = (json.loads(path.read_text()) for path in cache.glob("train-*.json"))
    assert facts["words"] == 920_000
    assert facts["bytes"] > 8_000_000


WITHOUT_SPACES = """
import random, sys
from pathlib import Path
from tra.bench.memory import added_megabytes
from tra.text import Source, load_tokenizer, prepare

folder, cache, rng = Path(sys.argv[1]), Path(sys.argv[2]), random.Random(0)
folder.mkdir()
(folder / "train.txt").write_text("".join(rng.choices("ACGT", k=12_000_000)))
print(added_megabytes(lambda: load_tokenizer("bpe-280", Source(str(folder)), cache)))
tokenizer = load_tokenizer("bpe-280", Source(str(folder)), cache)
print(added_megabytes(lambda: prepare(Source(str(folder)), "train", tokenizer, cache)))
"""


@pytest.mark.skipif(not measurable(), reason="peak memory is read from Linux's /proc")
def test_memory_does_not_grow_with_a_text_without_spaces(cache: Path, tmp_path: Path) -> None:
    """Twelve megabytes at once would take 1,300 to learn from and as much to read."""
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_SPACES, str(tmp_path / "text"), str(cache)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stderr == ""
    training, reading = map(float, process.stdout.split())
    assert training < 400
    assert reading < 150
    (facts,) = (json.loads(path.read_text()) for path in cache.glob("train-*.json"))
    assert (facts["words"], facts["bytes"]) == (1, 12_000_001)


@pytest.mark.skipif(not measurable(), reason="peak memory is read from Linux's /proc")
def test_windows_of_a_large_file_do_not_load_it(tmp_path: Path) -> None:
    large = tmp_path / "large.tokens"
    with open(large, "wb") as file:
        file.truncate(1_000_000_000)  # takes no room on the disk
        file.seek(-2, os.SEEK_END)
        file.write(b"\x05\x00")
    task = Text("nowhere", None, "bpe-300")
    task._splits["train"] = Tokens(large, 500_000_000, 1, 1, "uint16")

    def draw() -> None:
        for step in range(8):
            batch = task.sample(torch.Generator().manual_seed(step), 16, 127)
            assert batch.tokens.shape == (16, 128)

    assert task.tokens("train").read()[-1] == 5
    assert added_megabytes(draw) < 50

"""A folder of text files that say no split: the text is divided, the same way every time, and nothing of it is lost."""

import random
from pathlib import Path

import pytest

import tra.text.source
from tests.text.reading import odd_text, prose
from tra.progress import shown
from tra.text import Source, Text

SPLITS = ("train", "valid", "test")


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text.encode())
    return folder


def parts_of(folder: Path) -> list[str]:
    source = Source(str(folder))
    return ["".join(source.pieces(split)) for split in SPLITS]


def test_nine_tenths_are_to_train_on_and_cuts_are_at_the_ends_of_lines(tmp_path: Path) -> None:
    chapters = [prose(seed, 1700) for seed in (1, 2, 3)]
    folder = write(tmp_path, one=chapters[0], three=chapters[1], two=chapters[2])
    parts, whole = parts_of(folder), "".join(chapters)
    assert "".join(parts) == whole
    assert all(part.endswith("\n") for part in parts)
    longest = max(map(len, whole.splitlines(keepends=True)))
    assert 0.9 * len(whole) - 1 < len(parts[0]) < 0.9 * len(whole) + longest
    assert abs(len(parts[1]) - 0.05 * len(whole)) < longest
    assert abs(len(parts[2]) - 0.05 * len(whole)) < longest


def test_no_character_is_lost_or_doubled_whatever_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for number in range(200):
        monkeypatch.setattr(tra.text.source, "PIECE", rng.randint(1, 40))
        monkeypatch.setattr(tra.text.source, "CUT_WITHIN", rng.choice([0.0, 0.01, 0.05, 1.0]))
        texts = {f"part{place}": odd_text(rng, rng.randint(0, 60)) for place in range(rng.randint(1, 4))}
        folder = write(tmp_path / str(number), **texts)
        whole = "".join(text if not text or text.endswith("\n") else text + "\n" for text in texts.values())
        assert "".join(parts_of(folder)) == whole


def test_a_text_of_one_line_is_cut_between_words(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(1000))
    parts = parts_of(write(tmp_path, story=words))
    assert all(part.endswith(" ") for part in parts[:2])
    assert [word for part in parts for word in part.split()] == words.split()
    assert 0.9 * len(words) < len(parts[0]) < 0.9 * len(words) + 10


def test_no_part_is_empty_however_long_the_lines_are(tmp_path: Path) -> None:
    for lines in (1, 2, 3, 5, 20, 21, 39):
        text = (" word" * 400 + "\n") * lines
        parts = parts_of(write(tmp_path / str(lines), story=text))
        assert 0.9 <= len(parts[0]) / len(text) < 0.93
        assert all(0.02 < len(part) / len(text) < 0.08 for part in parts[1:])


def test_a_text_without_words_is_cut_where_it_should_be(tmp_path: Path) -> None:
    assert list(map(len, parts_of(write(tmp_path, genes="ACGT" * 24 + "ACG\n")))) == [90, 5, 5]


def test_the_division_is_the_same_every_time_and_depends_on_the_text_alone(tmp_path: Path) -> None:
    first, again = (write(tmp_path / name, story=prose(1, 999)) for name in ("first", "again"))
    other = write(tmp_path / "other", story=prose(1, 1000))
    assert parts_of(first) == parts_of(first) == parts_of(again)
    fingerprints = [[Source(str(folder)).fingerprint(split) for split in SPLITS] for folder in (first, again, other)]
    assert fingerprints[0] == fingerprints[1]
    assert len({*fingerprints[0], *fingerprints[2]}) == 6


def test_a_line_says_so_once_and_only_where_a_text_is_divided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    divided = Source(str(write(tmp_path / "own", story=prose(1, 99))))
    said = Source(str(write(tmp_path / "split", train=prose(1, 99), valid=prose(2, 9), test=prose(3, 9))))
    with shown():
        for split in SPLITS:
            list(divided.pieces(split))
            list(said.pieces(split))
    assert capsys.readouterr().out == (
        f"no file in {tmp_path / 'own'} says train, valid or test in its name: the first 90% of the text is to train "
        "on, the next 5% to validate, the last 5% to test\n"
    )


def test_a_folder_that_says_some_split_is_not_divided(tmp_path: Path) -> None:
    source = Source(str(write(tmp_path, train="to train on\n", more="what is this\n")))
    assert "".join(source.pieces("train")) == "to train on\n"
    with pytest.raises(ValueError, match="text must hold a valid split: no file in"):
        source.files("valid")


def test_tokens_are_those_of_each_part(tmp_path: Path) -> None:
    folder = write(tmp_path / "own", story=prose(1, 3000))
    task = Text(str(folder), None, "bpe-300")
    for split, part in zip(SPLITS, parts_of(folder), strict=True):
        assert task.tokenizer.decode(task.tokens(split).read().tolist(), skip_special_tokens=False) == part
        assert task.tokens(split).bytes == len(part.encode())


def test_a_path_that_is_a_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, story="words\n") / "story.txt"
    with pytest.raises(ValueError, match=f"text must be a folder of text files, but {file} is a file: give the folder"):
        Source(str(file))

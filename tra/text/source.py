"""Where text comes from: a folder of files, or a data set on the hub."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from tra.errors import RunError
from tra.lookup import lookup
from tra.progress import progress, say

SPLITS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test", "testing"),
}
"""The words in a file's name that say which split it holds."""

SUFFIXES = (".txt", ".tokens", ".raw", ".parquet")

HUB = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
}
"""Data sets that are known by name; a folder of that name inside the folder $TRA_DATA comes first."""

PIECE = 1 << 18
"""Characters in a piece, about: what is held in memory at a time."""

LONGEST = 1 << 18
"""Characters without a place to cut that are held in memory; what is longer is cut all the same."""

ROWS = 1000
"""Rows of a table that are held in memory at a time."""

SHARES = {"train": (0.0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1.0)}
"""Of a text whose files say no split, the part that each split is, by characters."""

CUT_WITHIN = 0.025
"""How far such a cut may move on to the end of a line, or else of a word, so that no split is left empty."""

BOUNDARIES = (
    re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)"),
    re.compile(r"(?=[ \t\r\n]\w)"),
    re.compile(r"(?<=[^\W_])(?=[,.;:!?)\]\"\u3001\u3002\u300d\u300f\uff01\uff09\uff0c\uff0e\uff1a\uff1b\uff1f])"),
)
"""A space before a word belongs to it, and a single line break to nothing else. Where a text has neither: of several
characters of white space, GPT-2's pattern takes the last by itself or with the word that follows. Where it has no white
space: a letter or digit never shares a token with the punctuation after it."""


def local(name: str) -> Path | None:
    """The folder that a name stands for: in the folder $TRA_DATA if there is one, else as a path."""
    data = os.environ.get("TRA_DATA")
    if data and not Path(data).is_dir():
        raise ValueError(f"TRA_DATA must be a folder, got {data!r}")
    places = [Path(data) / name] if data else []
    return next((place for place in (*places, Path(name)) if place.is_dir()), None)


class Source:
    """The text of each split.

    Args:
        name: one of `HUB`, or a folder whose files say train, valid or test in their names. If none does, the text is
            divided: its beginning is to train on, its end to validate and test.
    """

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, local(name)
        self._fingerprints: dict[str, str] = {}
        if self.folder is None and Path(name).is_file():
            raise ValueError(
                f"text must be a folder of text files, but {name} is a file: give the folder that holds it"
            )
        if self.folder is None and name not in HUB:
            raise ValueError(
                f"text must be a folder of {', '.join(SUFFIXES)} files or one of {', '.join(HUB)} from the hub, "
                f"got {name!r}"
            )

    @cached_property
    def everything(self) -> list[Path]:
        """The files with text in the folder."""
        assert self.folder is not None
        found: list[Path] = []
        try:
            for place, folders, names in os.walk(self.folder, onerror=_raise):
                folders[:] = [name for name in folders if not name.startswith(".")]
                paths = (Path(place, name) for name in names if not name.startswith("."))
                texts = (path for path in paths if path.suffix.lower() in SUFFIXES)
                found += [path for path in texts if stat.S_ISREG(path.stat().st_mode)]
        except OSError as error:
            raise ValueError(f"text must be readable, but {error.filename} is not: {error.strerror}") from error
        return sorted(found)

    @cached_property
    def is_divided_here(self) -> bool:
        """Whether no file says a split, so that the text must be divided."""
        if self.folder is None or not self.everything:
            return False
        known = {word for words in SPLITS.values() for word in words}
        divided = not any(_words(path) & known for path in self.everything)
        if divided:
            say(
                f"no file in {self.folder} says train, valid or test in its name: the first 90% of the text is to "
                "train on, the next 5% to validate, the last 5% to test"
            )
        return divided

    def files(self, split: str) -> list[Path]:
        """The files of a split in the folder; all of them where the text is divided here."""
        words = lookup(SPLITS, split, "split")
        if self.is_divided_here:
            return self.everything
        found = [path for path in self.everything if _words(path) & set(words)]
        for path in found:
            others = [name for name, says in SPLITS.items() if name != split and _words(path) & set(says)]
            if others:
                raise ValueError(
                    f"text must say one split in each file's name, but {path} says {split} and {others[0]}"
                )
        if not found:
            raise ValueError(
                f"text must hold a {split} split: no file in {self.folder} ends in {' or '.join(SUFFIXES)} and says "
                f"{' or '.join(words)} in its name"
            )
        return found

    def fingerprint(self, split: str) -> str:
        """Changes whenever the text does."""
        if split not in self._fingerprints:
            self._fingerprints[split] = self._digest(split)
        return self._fingerprints[split]

    def check_unchanged(self, split: str) -> None:
        """Raise a RunError if the text is no longer that of the fingerprint: what was read belongs under another."""
        if self._digest(split) != self.fingerprint(split):
            raise RunError(f"text must not change while it is read, but {split} of {self.name} did: start again")

    def _digest(self, split: str) -> str:
        digest = hashlib.sha256()
        if self.folder is None:
            digest.update(repr((HUB[self.name], split)).encode())
        else:
            for path in self.files(split):
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            if self.is_divided_here:
                digest.update(repr((SHARES[split], CUT_WITHIN)).encode())
        return digest.hexdigest()

    def megabytes(self, split: str) -> int:
        """How much text there is, about, to show progress."""
        if self.folder is None:
            return 540 if (self.name, split) == ("wikitext-103", "train") else 11
        return max(1, sum(path.stat().st_size for path in self.files(split)) >> 20)

    def pieces(self, split: str) -> Iterator[str]:
        """The text of a split in pieces, cut where GPT-2's pattern ends a token whatever stands around it; a text that
        has no such place for `LONGEST` characters is cut anywhere."""
        rest, enough = "", PIECE
        for chunk in self._chunks(split):
            rest += chunk
            while len(rest) >= enough:
                cut = _last_boundary(rest[: 2 * LONGEST]) or (LONGEST if len(rest) >= LONGEST else 0)
                if cut:
                    yield rest[:cut]
                    rest = rest[cut:]
                enough = PIECE if cut else 2 * len(rest)  # a text without boundaries is not searched again and again
        if rest:
            yield rest

    @contextmanager
    def shown(self, split: str, what: str) -> Iterator[Iterator[str]]:
        """The pieces of a split, with progress through them, whichever thread asks for them."""
        total = self.megabytes(split)

        def pieces() -> Iterator[str]:
            size = 0
            for piece in self.pieces(split):
                yield piece
                size += len(piece.encode())
                update(min(total, size >> 20))

        with progress(f"{what} of {self.name}, {split}", total, "MB") as update:
            yield pieces()

    def _chunks(self, split: str) -> Iterator[str]:
        """The text of a split in parts of any size; every file ends a line."""
        if self.folder is None:
            yield from _hub_rows(self.name, split)
        elif self.is_divided_here:
            yield from _between(_texts(self.everything), *self._cuts[split])
        else:
            yield from _texts(self.files(split))

    @cached_property
    def _cuts(self) -> dict[str, tuple[int, int]]:
        """Where each split begins and ends in a text that is divided here, in characters."""
        total = sum(map(len, _texts(self.everything)))

        def moved(share: float) -> int:
            exact = int(share * total)
            if exact in (0, total):
                return exact
            word, at = 0, exact
            for part in _between(_texts(self.everything), exact, exact + int(CUT_WITHIN * total)):
                if "\n" in part:
                    return at + part.find("\n") + 1
                word = word or (" " in part and at + part.find(" ") + 1)
                at += len(part)
            return word or exact

        return {split: (moved(first), moved(last)) for split, (first, last) in SHARES.items()}


def _raise(error: OSError) -> NoReturn:
    raise error


def _texts(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        yield from _parquet_rows(path) if path.suffix.lower() == ".parquet" else _file_parts(path)


def _between(parts: Iterator[str], first: int, last: int) -> Iterator[str]:
    """The characters from first up to last."""
    at = 0
    for part in parts:
        if at >= last:
            return
        if at + len(part) > first:
            yield part[max(0, first - at) : last - at]
        at += len(part)


def _words(path: Path) -> set[str]:
    return set(re.split(r"[^a-z]+", path.name.lower()))


def _last_boundary(text: str) -> int:
    """0 if there is none."""
    for boundary in BOUNDARIES:
        for start in (max(0, len(text) - 4096), 0):
            found = [match.start() for match in boundary.finditer(text, start)]
            if found:
                return found[-1]
    return 0


def _file_parts(path: Path) -> Iterator[str]:
    part = "\n"
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while following := file.read(PIECE):
                yield following
                part = following
    except UnicodeDecodeError as error:
        raise ValueError(f"text must be UTF-8, but {path} is not: {error}") from error
    if not part.endswith("\n"):
        yield "\n"


def _parquet_rows(path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = {field.name: str(field.type) for field in file.schema_arrow}
            if columns.get("text") not in ("string", "large_string"):
                found = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
                raise ValueError(f"text must be strings in a column called text, but {path} has {found}")
            for batch in file.iter_batches(batch_size=ROWS, columns=["text"]):
                yield from map(_as_line, batch.column(0).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        reason = _first_line(error)
        raise ValueError(f"text must be readable, but {path} is no intact parquet file: {reason}") from error


def _hub_rows(name: str, split: str) -> Iterator[str]:
    from datasets import load_dataset

    repository, config = HUB[name]
    try:
        rows = load_dataset(repository, config, split="validation" if split == "valid" else split)
    except Exception as error:  # the hub's libraries raise many kinds
        raise RunError(
            f"{repository} could not be had from the hub ({type(error).__name__}: {_first_line(error)}). Offline, "
            f"download its files elsewhere and give their folder, or set TRA_DATA to a folder that holds it as {name}"
        ) from error
    for block in rows.iter(batch_size=ROWS):
        yield from map(_as_line, block["text"])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _as_line(row: str | None) -> str:
    """WikiText's rows end their lines; those of other data sets are documents."""
    return row if row and row.endswith("\n") else (row or "") + "\n"

"""Where text comes from: a folder of files, or a data set on the hub."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tra.errors import RunError
from tra.lookup import lookup

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

PIECE = 1 << 20
"""Characters in a piece, about: what is held in memory at a time."""

BOUNDARY = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
"""A space before a word belongs to it, and a single line break to nothing else."""


def local(name: str) -> Path | None:
    """The folder that a name stands for: in the folder $TRA_DATA if there is one, else as a path."""
    places = [Path(os.environ["TRA_DATA"]) / name] if os.environ.get("TRA_DATA") else []
    return next((place for place in (*places, Path(name)) if place.is_dir()), None)


class Source:
    """The text of each split.

    Args:
        name: one of `HUB`, or a folder whose files say train, valid or test in their names.
    """

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, local(name)
        if self.folder is None and name not in HUB:
            raise ValueError(
                f"text must be a folder of {', '.join(SUFFIXES)} files or one of {', '.join(HUB)} from the hub, "
                f"got {name!r}"
            )

    def files(self, split: str) -> list[Path]:
        """The files of a split in the folder."""
        assert self.folder is not None
        words = lookup(SPLITS, split, "split")
        found = sorted(
            path
            for path in self.folder.rglob("*")
            if path.suffix in SUFFIXES and set(re.split(r"[^a-z]+", path.name.lower())) & set(words)
        )
        if not found:
            raise ValueError(
                f"text must hold a {split} split: no file in {self.folder} ends in {' or '.join(SUFFIXES)} and says "
                f"{' or '.join(words)} in its name"
            )
        return found

    def fingerprint(self, split: str) -> str:
        """Changes whenever the text does."""
        digest = hashlib.sha256()
        if self.folder is None:
            digest.update(repr((HUB[self.name], split)).encode())
            return digest.hexdigest()
        for path in self.files(split):
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def megabytes(self, split: str) -> int:
        """How much text there is, about, to show progress."""
        if self.folder is None:
            return 540 if (self.name, split) == ("wikitext-103", "train") else 11
        return max(1, sum(path.stat().st_size for path in self.files(split)) >> 20)

    def pieces(self, split: str) -> Iterator[str]:
        """The text of a split, cut where GPT-2's pattern ends a token whatever stands around it."""
        rest = ""
        for chunk in self._chunks(split):
            rest += chunk
            if len(rest) >= PIECE and (cut := _last_boundary(rest)):
                yield rest[:cut]
                rest = rest[cut:]
        if rest:
            yield rest

    def _chunks(self, split: str) -> Iterator[str]:
        """The text of a split in parts of any size; every file ends a line."""
        if self.folder is None:
            yield from _hub_rows(*HUB[self.name], split)
            return
        for path in self.files(split):
            if path.suffix == ".parquet":
                yield from _parquet_rows(path)
            else:
                yield from _file_parts(path)


def _last_boundary(text: str) -> int | None:
    for start in (max(0, len(text) - 4096), 0):
        found = [match.start() for match in BOUNDARY.finditer(text, start)]
        if found:
            return found[-1]
    return None


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
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"text must be readable, but {path} is no parquet file: {error}") from error
    if "text" not in file.schema_arrow.names:
        raise ValueError(f"text must be in a column called text, but {path} has {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(columns=["text"]):
        yield from map(_as_line, batch.column(0).to_pylist())


def _hub_rows(name: str, config: str, split: str) -> Iterator[str]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, config, split="validation" if split == "valid" else split)
    except Exception as error:  # the hub's libraries raise many kinds
        reason = (str(error).splitlines() or [""])[0]
        raise RunError(
            f"{name} could not be had from the hub ({type(error).__name__}: {reason}). Offline, download its files "
            f"elsewhere and give their folder, or set TRA_DATA to the folder that holds it"
        ) from error
    for block in rows.iter(batch_size=1000):
        yield from map(_as_line, block["text"])


def _as_line(row: str | None) -> str:
    """WikiText's rows end their lines; those of other data sets are documents."""
    return row if row and row.endswith("\n") else (row or "") + "\n"

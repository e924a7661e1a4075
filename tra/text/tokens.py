"""Tokens of a text, written once to a memory-mapped file that is named by all it depends on."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy
from rich.console import Console
from tokenizers import Tokenizer

from tra.files import locked, sync, write_whole
from tra.text.source import Source
from tra.text.tokenizer import size_of

VERSION = 1
"""Raised whenever the same text and tokenizer would give another file."""


@dataclass(frozen=True)
class Tokens:
    """A split as tokens, and what it takes to say perplexity per word and per byte."""

    path: Path
    count: int
    words: int
    """Separated by whitespace."""
    bytes: int
    """Of the text in UTF-8."""
    dtype: str

    def read(self) -> numpy.memmap:
        """All tokens, mapped and not loaded."""
        return numpy.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.count,))


def prepare(source: Source, split: str, tokenizer: Tokenizer, cache: Path, console: Console) -> Tokens:
    """The tokens of a split, from the cache if they are there.

    Killed at any moment it leaves nothing that looks complete, and of several processes one writes and the others wait.
    """
    key = hashlib.sha256(repr((VERSION, source.fingerprint(split), tokenizer.to_str())).encode()).hexdigest()[:16]
    path = cache / f"{split}-{key}.tokens"
    facts = path.with_suffix(".json")
    cache.mkdir(parents=True, exist_ok=True)
    with locked(path, console):
        if not (facts.exists() and path.exists()):
            write_whole(facts, json.dumps(_write(source, split, tokenizer, path, console)))
    return Tokens(path=path, **json.loads(facts.read_text()))


def _write(source: Source, split: str, tokenizer: Tokenizer, path: Path, console: Console) -> dict[str, object]:
    dtype = "uint16" if size_of(tokenizer) <= 1 << 16 else "uint32"
    aside = path.with_name(f".{path.name}.partial")
    count = words = size = 0
    try:
        with open(aside, "wb") as file:
            for piece in source.shown(split, console, "tokens"):
                ids = numpy.array(tokenizer.encode(piece, add_special_tokens=False).ids, dtype=dtype)
                file.write(ids.tobytes())
                count += len(ids)
                words += len(piece.split())
                size += len(piece.encode())
        if count == 0:
            raise ValueError(f"text must not be empty, but the {split} split of {source.name} is")
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    except OSError as error:
        # A failed write does not name its file.
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
    finally:
        aside.unlink(missing_ok=True)
    return {"count": count, "words": words, "bytes": size, "dtype": dtype}

"""Tokens of a text, written once to a memory-mapped file that is named by all it depends on."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy
from tokenizers import Tokenizer

from tra.files import locked, write_json, written_aside
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


def prepare(source: Source, split: str, tokenizer: Tokenizer, cache: Path) -> Tokens:
    """The tokens of a split, from the cache if they are there.

    Killed at any moment it leaves nothing that looks complete, and of several processes one writes and the others wait.
    """
    key = hashlib.sha256(repr((VERSION, source.fingerprint(split), tokenizer.to_str())).encode()).hexdigest()[:16]
    path = cache / f"{split}-{key}.tokens"
    facts = path.with_suffix(".json")
    cache.mkdir(parents=True, exist_ok=True)
    with locked(path):
        if not (facts.exists() and path.exists()):
            write_json(facts, _write(source, split, tokenizer, path))
    return Tokens(path=path, **json.loads(facts.read_text()))


def _write(source: Source, split: str, tokenizer: Tokenizer, path: Path) -> dict[str, object]:
    dtype = "uint16" if size_of(tokenizer) <= 1 << 16 else "uint32"
    count = words = size = 0
    with written_aside(path) as aside:
        with open(aside, "wb") as file, source.shown(split, "tokens") as pieces:
            for piece in pieces:
                ids = numpy.array(tokenizer.encode(piece, add_special_tokens=False).ids, dtype=dtype)
                file.write(ids.tobytes())
                count += len(ids)
                words += len(piece.split())
                size += len(piece.encode())
        if count == 0:
            raise ValueError(f"text must not be empty, but the {split} split of {source.name} is")
    return {"count": count, "words": words, "bytes": size, "dtype": dtype}

"""Tokens of a text, written once to a memory-mapped file that is named by all it depends on."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy
from tokenizers import Tokenizer

from tra.files import locked, read_json, write_json, written_aside
from tra.progress import say
from tra.text.source import Source
from tra.text.tokenizer import encoded, size_of

VERSION = 2
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
    dtype = "uint16" if size_of(tokenizer) <= 1 << 16 else "uint32"
    with locked(path):
        if facts.exists() and path.exists():
            try:
                return _stored(path, facts, dtype)
            except ValueError as error:
                say(f"{path} is made again: {error}")
        write_json(facts, _write(source, split, tokenizer, path, dtype))
        return _stored(path, facts, dtype)


def _stored(path: Path, facts: Path, dtype: str) -> Tokens:
    """A ValueError if one of the two files is damaged."""
    content = read_json(facts)
    wanted = {"count": int, "words": int, "bytes": int, "dtype": str}
    if not isinstance(content, dict) or {name: type(value) for name, value in content.items()} != wanted:
        raise ValueError(f"{facts.name} must hold {', '.join(wanted)}")
    if content["dtype"] != dtype:
        raise ValueError(f"{facts.name} says {content['dtype']!r}, but the tokenizer needs {dtype}")
    size = content["count"] * numpy.dtype(dtype).itemsize
    if path.stat().st_size != size or size == 0:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, but {facts.name} says {size:,}")
    return Tokens(path=path, **content)


def _write(source: Source, split: str, tokenizer: Tokenizer, path: Path, dtype: str) -> dict[str, object]:
    count = words = size = 0
    inside = False
    with written_aside(path) as aside:
        with open(aside, "wb") as file, source.shown(split, "tokens") as pieces:
            for piece in pieces:
                ids = numpy.array(encoded(tokenizer, piece), dtype=dtype)
                file.write(ids.tobytes())
                count += len(ids)
                cut = inside and not piece[0].isspace()  # a word that is in both pieces
                words += len(piece.split()) - cut
                inside = not piece[-1].isspace()
                size += len(piece.encode())
        if count == 0:
            raise ValueError(f"text must not be empty, but the {split} split of {source.name} is")
        source.check_unchanged(split)
    return {"count": count, "words": words, "bytes": size, "dtype": dtype}

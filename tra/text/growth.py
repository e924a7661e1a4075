"""How much longer a tokenizer can make a text: a file from elsewhere must not be able to ask for all memory."""

import base64
import json
import math
from typing import Any

from tokenizers import Tokenizer

MOST_DECLARED = 256
"""Characters that the steps of a stored tokenizer may make of one, if each did its worst."""
MOST_MEASURED = 8
"""Times its length that a text may have after normalising: far beyond what happens to any text in any language."""
MOST_STEPS = 64
LONGEST_STRING = 1024
"""Of a file's strings that are neither tokens nor tables: patterns, prefixes, the unknown token."""
SLICE = 4096
"""Characters that are normalised at a time to see how they grow."""

STEPS = ("normalizer", "pre_tokenizer", "decoder")
LISTS = ("normalizers", "pretokenizers", "decoders")
"""What a Sequence of each calls its steps."""
TABLES = ("vocab", "merges")
FIXED = {"ByteLevel": 4, "BertNormalizer": 3, "Metaspace": 2}
"""Steps whose growth multiplies when they are repeated. That of Unicode's own forms, 18 at most, does not."""


def check_declared(stored: bytes) -> None:
    """Raise a ValueError for a tokenizer.json whose steps could make far too much of a short text. Merely to load such
    a file may normalise its tokens."""
    try:
        content = json.loads(stored, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it must hold the parts of a tokenizer, got {type(content).__name__}")
    for name in STEPS:
        steps = _flat(content.get(name))
        if len(steps) > MOST_STEPS:
            raise ValueError(f"its {name} must have at most {MOST_STEPS} steps, got {len(steps)}")
        growth = math.prod(map(_growth, steps))
        if growth > MOST_DECLARED:
            raise ValueError(f"its {name} must make at most {MOST_DECLARED} characters of one, got {growth:.4g}")
    model = content.get("model")
    others = {name: x for name, x in model.items() if name not in TABLES} if isinstance(model, dict) else None
    for text in _strings([others, content.get("pre_tokenizer"), content.get("decoder"), content.get("post_processor")]):
        if len(text) > LONGEST_STRING:
            raise ValueError(f"its strings must have at most {LONGEST_STRING:,} characters, got {len(text):,}")


def check_measured(tokenizer: Tokenizer, text: str) -> None:
    """Raise a ValueError if normalising makes the text many times longer. The declared growth is bounded already."""
    normalizer = tokenizer.normalizer
    if normalizer is None:
        return
    grown = 0
    for start in range(0, len(text), SLICE):
        grown += len(normalizer.normalize_str(text[start : start + SLICE]))
        if grown > MOST_MEASURED * max(len(text), SLICE):
            raise ValueError(
                f"tokenizer must not make a text more than {MOST_MEASURED} times longer, but its normalizer makes "
                f"{grown:,} characters of {min(start + SLICE, len(text)):,}"
            )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no name is given twice: the library may take another of its values than we do."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return found


def _flat(step: Any) -> list[dict[str, Any]]:
    """The steps of a part one after the other, however they are nested."""
    waiting, found = [step], []
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            inner = next((step[name] for name in LISTS if isinstance(step.get(name), list)), None)
            if inner is None:
                found.append(step)
            else:
                waiting += inner
    return found


def _growth(step: dict[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), str(step.get("content"))
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression may match nothing at all, between any two characters.
        return max(1.0, len(content) / len(literal)) if literal else 1.0 + len(content)
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend")))
    if kind == "Precompiled":
        return _longest_entry(str(step.get("precompiled_charsmap")))
    return FIXED.get(str(kind), 1)


def _longest_entry(table: str) -> int:
    """Of SentencePiece's table: the size of a trie, the trie, and what it points to, each ended by a zero."""
    content = base64.b64decode(table)
    entries = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    return max(1, *(len(entry.decode(errors="replace")) for entry in entries))


def _strings(nested: Any) -> list[str]:
    waiting, found = [nested], []
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return found

"""Small folders of text, and the real data where they are at hand."""

import os
import random
from pathlib import Path

import pytest

DATA = Path(os.environ.get("TRA_DATA") or Path(__file__).parents[3] / "shared" / "data")

needs_data = pytest.mark.skipif(
    not all((DATA / name).is_dir() for name in ("wikitext-2", "wikitext-103", "gpt2")),
    reason="needs the folders wikitext-2, wikitext-103 and gpt2 in $TRA_DATA or ../shared/data",
)

# Whatever a pattern could take for the beginning or the end of a word.
ODD = [
    *(" ", "\n", "\r\n", "\r", "\t", "\v", "\f", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\u3000"),
    *("a", "Bc", "7", "42", "!", "...", "'", "'s", "'ll", "-", "_", "é", "e\u0301", "中文", "\u0661", "😀"),
    *("\U0001f469\u200d\U0001f467", "\u200b", "\ufeff", "\0", "<|endoftext|>"),
]


def prose(seed: int, words: int) -> str:
    """Lines of invented words."""
    rng = random.Random(seed)
    syllables = ["ka", "to", "mi", "ren", "sol", "u", "bra", "is"]
    lines, line = [], []
    for _ in range(words):
        line.append("".join(rng.choices(syllables, k=rng.randint(1, 3))))
        if rng.random() < 0.1:
            lines.append(" " + " ".join(line) + " .\n")
            line = []
    return "".join(lines) + " ".join(line) + "\n"


def odd_text(rng: random.Random, pieces: int) -> str:
    """A text of few kinds of odd pieces, so that runs and all their combinations occur."""
    kinds = rng.sample(ODD, rng.randint(2, 9))
    return "".join(rng.choices(kinds, k=pieces))


def write_folder(folder: Path, train: str, valid: str = "", test: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        if text:
            (folder / f"{split}.txt").write_bytes(text.encode())
    return folder

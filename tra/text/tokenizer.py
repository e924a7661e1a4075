"""Tokenizers: GPT-2's from the hub or a folder, or a byte-level BPE of any size trained on the text at hand."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tra.errors import RunError
from tra.files import locked, opened, write_text
from tra.progress import say
from tra.text.source import Source, local

PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
"""Names of the vocabulary and the merges of a byte-level BPE in a folder."""

STORED = "tokenizer.json"
END = "<|endoftext|>"
VERSION = 2
"""Raised whenever the same text would give another tokenizer."""

LONG_WORD = 256
"""Characters. The time that the library takes to learn from a word is quadratic in its length."""
LONG_WORDS = 1 << 21
"""Bytes of words that are longer, of which training learns from no more: it keeps about 110 bytes for each byte of
words that do not repeat, and these never do."""
LONG_STRETCH = re.compile(rf"(?<!\S)\S{{{LONG_WORD + 1},}}")


def load_tokenizer(name: str, source: Source | None, cache: Path) -> Tokenizer:
    """The tokenizer that a name stands for.

    Args:
        name: "gpt2" from the hub; a folder that holds `tokenizer.json`, `encoder.json` and `vocab.bpe`, or `vocab.json`
            and `merges.txt`; or "bpe-N", a byte-level BPE of N tokens trained on the source's training split.
        source: the text to train on, which only bpe-N needs.
        cache: folder for a trained tokenizer, which is trained once.
    """
    if is_trained(name):
        assert source is not None
        return _trained(name, source, cache)
    folder = local(name) or Path(name)
    try:
        with panics_caught():
            found = _in_folder(folder)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"tokenizer must be readable, but that in {folder} is not: {error}") from error
    if found is not None:
        return found
    if name == "gpt2":
        try:
            return Tokenizer.from_pretrained("gpt2")
        except Exception as error:  # the hub's library raises many kinds
            raise RunError(
                f"GPT-2's tokenizer could not be had from the hub ({type(error).__name__}). Offline, give a folder "
                f"with encoder.json and vocab.bpe, or set TRA_DATA to a folder that holds it as gpt2"
            ) from error
    raise ValueError(
        f"tokenizer must be gpt2, bpe-N, or a folder with tokenizer.json or encoder.json and vocab.bpe, got {name!r}"
    )


@contextmanager
def panics_caught() -> Iterator[None]:
    """Where the library gives up, a ValueError: what it raises itself is no Exception, and passes every handler."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"tokenizer must be one that works, but it fails: {error}") from error


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, with nothing added; a ValueError where the tokenizer fails."""
    with panics_caught():
        return tokenizer.encode(text, add_special_tokens=False).ids


def taught(pieces: Iterable[str]) -> Iterator[str]:
    """What training reads of a text: all of it if white space divides it into words; of longer stretches without any,
    the first two megabytes, each cut into words."""
    room = LONG_WORDS
    for piece in pieces:
        if len(max(piece.split(), key=len, default="")) <= LONG_WORD:
            yield piece
            continue
        end = 0
        for stretch in LONG_STRETCH.finditer(piece):
            yield piece[end : stretch.start()]
            end = stretch.end()
            for start in range(stretch.start(), end, LONG_WORD):
                word = piece[start : min(start + LONG_WORD, end)]
                room -= len(word.encode())
                if room < 0:
                    break
                yield word
        yield piece[end:]


def size_of(tokenizer: Tokenizer) -> int:
    """One more than the largest token, whether or not all those below it are used."""
    return max(tokenizer.get_vocab().values()) + 1


def is_trained(name: str) -> bool:
    """Whether the tokenizer is made from the text."""
    return name.startswith("bpe-")


def _in_folder(folder: Path) -> Tokenizer | None:
    if (folder / STORED).is_file():
        tokenizer = Tokenizer.from_buffer((folder / STORED).read_bytes())
        tokenizer.no_truncation()  # some are stored with a longest text
        tokenizer.no_padding()
        return tokenizer
    for vocabulary, merges in PAIRS:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return _byte_level(models.BPE.from_file(str(folder / vocabulary), str(folder / merges)))
    return None


def _trained(name: str, source: Source, cache: Path) -> Tokenizer:
    size = name.removeprefix("bpe-")
    if not size.isdecimal() or int(size) < 257:
        raise ValueError(f"tokenizer must be bpe-N with N at least 257, the bytes and an end of text, got {name!r}")
    key = hashlib.sha256(repr((VERSION, name, source.fingerprint("train"))).encode()).hexdigest()[:16]
    path = cache / f"{name}-{key}.json"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(path):
        if path.exists():
            with opened(path) as file:
                stored = file.read()
            try:
                with panics_caught():
                    return Tokenizer.from_buffer(stored)
            except Exception as error:  # the library raises nothing more special
                say(f"{path} is made again: it is no intact tokenizer ({error})")
        tokenizer = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=int(size),
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        with source.shown("train", name) as pieces:
            tokenizer.train_from_iterator(taught(pieces), trainer)
        source.check_unchanged("train")
        write_text(path, tokenizer.to_str())
        return Tokenizer.from_file(str(path))


def _byte_level(model: models.BPE) -> Tokenizer:
    """GPT-2's way around a BPE: its pattern, bytes as characters, nothing added."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END) is not None:
        tokenizer.add_special_tokens([AddedToken(END)])
    return tokenizer

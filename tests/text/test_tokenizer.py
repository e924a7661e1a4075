"""GPT-2's tokenizer against the algorithm written out, and byte-level BPEs trained on the text at hand."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Tokenizer

import tra.text.tokenizer
from tests.text.reading import DATA, needs_data, odd_text, prose, write_folder
from tra.text import Source, load_tokenizer
from tra.text.tokenizer import LONG_WORD, encoded, taught

ODD_TEXTS = [
    "Hello world",
    "Hello   world,  it's   we'll 've I'M   ",
    " \n\n  leading\n\n\n and \t\ttabs\t\n",
    "naïve café, Ελληνικά, 中文字符, العربية, हिन्दी, ไทย",
    "😀👩\u200d👩\u200d👧 🏳️\u200d🌈 e\u0301",
    "1234567890 3.14159 1,000,000 x2 ²³ ½",
    "a\r\nb\rc\x0bd\x0ce\x85f\u00a0g\u2003h\u2028i\u3000j\u200bk",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # !?\n",
    "\x00\x01\x7f\ufeff\ufffd\U0010ffff",
    " = Robert <unk> = \n \n @-@ @,@ @.@ '' `` \n",
    "\n",
    " ",
    "",
]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    rng = random.Random(0)
    return Source(str(write_folder(tmp_path / "text", prose(1, 3000) + "".join(odd_text(rng, 99) for _ in range(9)))))


def characters_of_bytes() -> dict[int, str]:
    """GPT-2's way of writing every byte as a visible character."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(others)}


class WrittenOut:
    """GPT-2's tokenizer as it was published: a pattern, then the merge of lowest rank until there is none."""

    def __init__(self, vocabulary: Path, merges: Path) -> None:
        self.ids = json.loads(vocabulary.read_text())
        lines = (line for line in merges.read_text().splitlines() if line and not line.startswith("#version"))
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
        self.characters = characters_of_bytes()
        self.pattern = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def encode(self, text: str) -> list[int]:
        found = []
        for word in self.pattern.findall(text):
            parts = [self.characters[byte] for byte in word.encode()]
            while True:
                ranks = [self.ranks.get(pair, len(self.ranks)) for pair in itertools.pairwise(parts)]
                if not ranks or min(ranks) == len(self.ranks):
                    break
                first, second = parts[ranks.index(min(ranks))], parts[ranks.index(min(ranks)) + 1]
                merged, place = [], 0
                while place < len(parts):
                    both = parts[place : place + 2] == [first, second]
                    merged.append(first + second if both else parts[place])
                    place += 2 if both else 1
                parts = merged
            found += [self.ids[part] for part in parts]
        return found


@needs_data
def test_gpt2_from_a_folder_is_gpt2(source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"vocab": str(DATA / "gpt2" / "encoder.json"), "merges": str(DATA / "gpt2" / "vocab.bpe")}
    monkeypatch.setenv("TRA_DATA", str(DATA))
    ours = load_tokenizer("gpt2", source, cache)
    assert ours.encode("Hello world").ids == [15496, 995]
    assert ours.get_vocab_size() == 50257
    assert ours.encode("a<|endoftext|>b").ids == [64, 50256, 65]
    written_out = WrittenOut(DATA / "gpt2" / "encoder.json", DATA / "gpt2" / "vocab.bpe")
    theirs, rng = GPT2Tokenizer(**files), random.Random(0)
    pieces = (odd_text(rng, 70).replace("<|endoftext|>", "") for _ in range(100))
    for text in [*ODD_TEXTS, *pieces]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == written_out.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text
    again = load_tokenizer(str(DATA / "gpt2"), source, cache)
    assert again.to_str() == ours.to_str()


@pytest.mark.parametrize("names", tra.text.tokenizer.PAIRS, ids="+".join)
def test_files_of_a_byte_level_bpe_are_read_as_gpt2_reads_them(
    names: tuple[str, str], source: Source, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    trained = load_tokenizer("bpe-500", source, cache)
    for name, written in zip(names, trained.model.save(str(tmp_path)), strict=True):
        (folder / name).write_bytes(Path(written).read_bytes())
    ours, written_out = (
        load_tokenizer(str(folder), source, cache),
        WrittenOut(*(folder / name for name in names)),
    )
    rng = random.Random(3)
    pieces = (odd_text(rng, 70).replace("<|endoftext|>", "") for _ in range(100))
    for text in [*ODD_TEXTS, prose(9, 200), *pieces]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == written_out.encode(text) == trained.encode(text).ids
    assert ours.encode("<|endoftext|>").ids == trained.encode("<|endoftext|>").ids == [0]


def test_a_stored_tokenizer_is_read_without_its_longest_text_and_padding(
    source: Source, cache: Path, tmp_path: Path
) -> None:
    trained = load_tokenizer("bpe-300", source, cache)
    plain = trained.encode("a long text " * 50).ids
    trained.enable_truncation(max_length=7)
    trained.enable_padding(length=9)
    trained.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    trained.save(str(tmp_path / "tokenizer.json"))
    stored = load_tokenizer(str(tmp_path), source, cache)
    assert len(plain) > 100
    assert stored.encode("a long text " * 50, add_special_tokens=False).ids == plain


@pytest.mark.parametrize("size", [257, 300, 511])
def test_a_trained_bpe_has_as_many_tokens_as_asked_for_and_any_text_comes_back(
    size: int, source: Source, cache: Path
) -> None:
    tokenizer, rng = load_tokenizer(f"bpe-{size}", source, cache), random.Random(size)
    assert tokenizer.get_vocab_size() == size
    planes = (range(0xD800), range(0xE000, 0x110000))
    anything = ["".join(chr(rng.choice(rng.choice(planes))) for _ in range(40)) for _ in range(50)]
    for text in [*ODD_TEXTS, *(odd_text(rng, 50) for _ in range(200)), *anything]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert all(0 <= token < size for token in ids)


def test_training_is_deterministic_and_depends_on_the_training_split_and_the_size(
    source: Source, tmp_path: Path
) -> None:
    first, second = (load_tokenizer("bpe-400", source, tmp_path / name) for name in ("first", "second"))
    assert first.to_str() == second.to_str()
    (one,), (two,) = ((tmp_path / name).glob("*.json") for name in ("first", "second"))
    assert one.name == two.name
    load_tokenizer("bpe-401", source, tmp_path / "first")
    assert source.folder is not None
    (source.folder / "valid.txt").write_text("of no matter\n")
    load_tokenizer("bpe-400", Source(source.name), tmp_path / "first")
    assert len(list((tmp_path / "first").glob("*.json"))) == 2
    (source.folder / "train.txt").write_text("the the the then their there\n" * 9)
    other = load_tokenizer("bpe-400", Source(source.name), tmp_path / "first")
    assert len(list((tmp_path / "first").glob("*.json"))) == 3
    assert len(other.encode(" the").ids) == 1 < len(first.encode(" the").ids)


def test_merges_are_those_of_the_most_frequent_pairs(tmp_path: Path) -> None:
    """By hand: "ab" occurs 5 times, then "abc" 3 times, then " abc" 2 times."""
    source = Source(str(write_folder(tmp_path / "text", "abc abc\nab\nab\n abc\n")))
    sizes = {size: load_tokenizer(f"bpe-{size}", source, tmp_path / "cache") for size in (257, 258, 259, 260)}
    tokens = {size: tokenizer.encode(" abc").tokens for size, tokenizer in sizes.items()}
    assert tokens == {257: ["Ġ", "a", "b", "c"], 258: ["Ġ", "ab", "c"], 259: ["Ġ", "abc"], 260: ["Ġabc"]}


def test_training_reads_the_text_once_for_all(source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = load_tokenizer("bpe-300", source, cache)
    monkeypatch.setattr(Source, "pieces", None)
    assert load_tokenizer("bpe-300", source, cache).to_str() == trained.to_str()
    assert not list(cache.glob(".*.partial"))


def test_training_reads_no_long_word_and_of_a_text_without_spaces_a_bounded_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library takes for a word, and all words together, decide its time and its memory."""
    monkeypatch.setattr(tra.text.tokenizer, "LONG_WORDS", 5000)
    spaced, dense = prose(2, 400), "中文字符" * 2000
    read = list(taught([spaced, f"before {dense} after\n", spaced, "ACGT" * 300, "the end"]))
    words = [word for part in read for word in part.split()]
    assert max(map(len, words)) == LONG_WORD
    assert sum(len(word.encode()) for word in words if len(word) == LONG_WORD) <= 5000
    assert [part for part in read if set(part) - set(dense)] == [spaced, "before ", " after\n", spaced, "the end"]
    assert "".join(taught([spaced, "x" * 1000])) == spaced + "x" * 1000


def test_a_text_that_repeats_without_spaces_is_learned(tmp_path: Path) -> None:
    source = Source(str(write_folder(tmp_path / "text", "ACGTTA" * 5000)))
    tokenizer = load_tokenizer("bpe-262", source, tmp_path / "cache")
    text = "ACGTTA" * 1000
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text) / 6
    assert tokenizer.decode(ids) == text


def stored_tokenizer(folder: Path, text: str = "ab", **parts: Any) -> Path:
    """A tokenizer of single characters, with other parts as given."""
    plain = json.loads(Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(text)}, merges=[])).to_str())
    model = {**plain["model"], **parts.pop("model", {})}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({**plain, **parts, "model": model}))
    return folder


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(name: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def test_normalisers_as_published_tokenizers_have_them_are_taken(tmp_path: Path) -> None:
    steps = [replace("``", '"'), {"type": "NFKD"}, {"type": "Lowercase"}, replace(" {2,}", "▁", "Regex")]
    published = [
        sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        sequence("normalizers", *steps),
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
    ]
    for normalizer in published:
        folder = stored_tokenizer(tmp_path, "▁ab", normalizer=normalizer)
        assert encoded(load_tokenizer(str(folder), None, tmp_path), "AB a b".lower())


def test_a_pattern_that_gives_up_is_one_error(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_tokenizer(str(stored_tokenizer(tmp_path, pre_tokenizer=split)), None, tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer must be one that works, but it fails: .*retry-limit"):
        encoded(tokenizer, "a" * 40 + "b")
    model = {"continuing_subword_prefix": "x" * 9, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    folder = stored_tokenizer(tmp_path, model=model)
    with pytest.raises(ValueError, match=f"that in {folder} is not: tokenizer must be one that works, but it fails: "):
        load_tokenizer(str(folder), None, tmp_path)


@pytest.mark.parametrize("name", ["bpe-256", "bpe-0", "bpe-", "bpe-many", "bpe--300", "bpe-3e2"])
def test_too_few_tokens_are_refused(name: str, source: Source, cache: Path) -> None:
    message = f"tokenizer must be bpe-N with N at least 257, the bytes and an end of text, got '{name}'"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(name, source, cache)


def test_what_is_no_tokenizer_is_named(source: Source, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer must be gpt2, bpe-N, or a folder with .* got 'gpt3'"):
        load_tokenizer("gpt3", source, cache)
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer must be gpt2, bpe-N, or a folder with .* got '/"):
        load_tokenizer(str(tmp_path), source, cache)
    (tmp_path / "vocab.bpe").write_text("a b c d\n")
    with pytest.raises(ValueError, match=f"tokenizer must be readable, but that in {tmp_path} is not: ") as caught:
        load_tokenizer(str(tmp_path), source, cache)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text('{"version": 1')
    with pytest.raises(ValueError, match=f"tokenizer must be readable, but that in {tmp_path} is not: "):
        load_tokenizer(str(tmp_path), source, cache)


def test_any_other_stored_tokenizer_is_taken_as_it_is(source: Source, cache: Path, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "ka": 1, "to": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path), source, cache).encode("to ka mi").ids == [2, 1, 0]

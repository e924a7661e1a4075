"""Odd texts and hostile tokenizers: every text comes back from its tokens, or what is wrong with it is said."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.calling import limited
from tests.fuzz.strategies import TRIED, attack, texts
from tra.errors import RunError
from tra.text import Source, load_tokenizer, prepare


@attack(60)
@given(st.lists(texts(), min_size=1, max_size=3), st.sampled_from(["train.txt", "a.txt", "train.parquet"]))
def test_any_text_comes_back_from_its_tokens(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], name: str
) -> None:
    TRIED["odd texts"] += 1
    folder = tmp_path_factory.getbasetemp() / "text"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, content in enumerate(contents):
        (folder / f"{number}-{name}").write_bytes(content)
    try:
        with limited(60):
            source = Source(str(folder))
            tokenizer = load_tokenizer("bpe-270", source, folder / "cache")
            tokens = prepare(source, "train", tokenizer, folder / "cache")
    except (ValueError, RunError) as error:
        assert str(error)
        assert "\n" not in str(error)
        return
    text = tokenizer.decode(tokens.read().tolist(), skip_special_tokens=False)
    whole = "".join(c.decode() if not c or c.endswith(b"\n") else c.decode() + "\n" for c in contents)
    assert whole.startswith(text)
    assert text == whole or name == "a.txt"  # of which the end is to be measured on
    assert (tokens.words, tokens.bytes) == (len(text.split()), len(text.encode()))

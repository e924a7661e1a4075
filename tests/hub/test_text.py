"""Text from a run or an exported folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from tests.language_run import text_recipe, write_text
from tra import Sampling
from tra.hub.generation import generate, load, written
from tra.runs import load_run, train


def test_run_and_exported_folder_generate_the_same(language_run: Path, exported: Path) -> None:
    texts = [
        generate(*load(folder), "The river", 12, Sampling(1.0), seed=3)["text"] for folder in (language_run, exported)
    ]
    assert texts[0] == texts[1] != ""


def test_greedy_text_is_the_most_probable_by_a_plain_loop(language_run: Path) -> None:
    decoder = load_run(language_run).model
    task = load_run(language_run).task
    tokens, _ = task.read("In 1847 the")
    length = len(tokens)
    with torch.inference_mode():
        for _ in range(15):
            tokens = torch.cat([tokens, decoder(tokens[None])[0, -1:].argmax(dim=-1)])
    result = generate(*load(language_run), "In 1847 the", 15)
    assert result["text"] == task.text(tokens[length:])
    assert result["new_tokens"] == 15
    assert result["prompt_tokens"] == length
    assert result["tokens_per_second"] > 0


def test_nothing_is_added_to_a_prompt(language_run: Path) -> None:
    model, tokenizer = load(language_run)
    end = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = end
    assert tokenizer("The river")["input_ids"][-1] == 0
    plain = tokenizer("The river", add_special_tokens=False)["input_ids"]
    assert generate(model, tokenizer, "The river", 1)["prompt_tokens"] == len(plain)


def test_text_is_shown_while_it_comes_and_is_what_transformers_writes(exported: Path) -> None:
    """At every step of the model, what was there of the text before it."""
    model, tokenizer = load(exported)
    shown, pieces = [], []
    choose = Sampling.choose

    def watched(*arguments: Any) -> Any:
        shown.append("".join(pieces))
        return choose(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampling, "choose", watched)
        text = generate(model, tokenizer, "The river", 40, Sampling(1.0), seed=5, show=pieces.append)["text"]
    assert "".join(pieces) == text
    assert len(shown) == 40
    assert shown[0] == ""
    assert len(set(shown)) > 5
    assert all(text.startswith(part) for part in shown)
    ids = tokenizer("The river", return_tensors="pt")["input_ids"]
    torch.manual_seed(5)
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=True, top_k=0)
    assert text == tokenizer.decode(theirs[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("text", ["plain words", "eine große Größe", "日本語 🙂🙂 e", "🙂"])
def test_pieces_end_where_characters_do(text: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(exported)
    tokens = tokenizer(text)["input_ids"]
    for count in (len(tokens), len(tokens) - 1):
        steps = [torch.tensor([token]) for token in tokens[:count]]
        monkeypatch.setattr("tra.hub.generation.stream_tokens", lambda *_, steps=steps, **__: iter(steps))
        found = list(written(model, tokenizer, torch.tensor([[1]]), 99, Sampling(), 0))
        assert [token for token, _ in found if token is not None] == tokens[:count]
        assert "".join(piece for _, piece in found) == tokenizer.decode(tokens[:count])
        assert not any("\ufffd" in piece for token, piece in found if token is not None)


def test_a_space_between_prompt_and_continuation_stays(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers that write spaces as ▁ drop the one with which a text begins."""
    model, _ = load(exported)
    words = Tokenizer(models.WordLevel({"?": 0, "▁The": 1, "▁river": 2, "s": 3}, "?"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    steps = [torch.tensor([token]) for token in (2, 3)]
    monkeypatch.setattr("tra.hub.generation.stream_tokens", lambda *_, **__: iter(steps))
    found = written(model, tokenizer, torch.tensor([[1]]), 99, Sampling(), 0)
    assert "The" + "".join(piece for _, piece in found) == "The rivers" == tokenizer.decode([1, 2, 3])


def test_a_run_does_not_go_on_with_the_tokenizer_of_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    recipe = replace(text_recipe(write_text(tmp_path / "text")), steps=2)
    train(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "tokenizer.json").read_text()
    (tmp_path / "text" / "train.txt").write_text("another text altogether , without any river\n" * 50)
    with pytest.raises(ValueError, match=r"text must be that on which the run in .* began"):
        train(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_text() == before

"""Text from a run or an exported folder."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from tests.language_run import text_recipe, write_text
from tra.hub import TraForCausalLM
from tra.hub.generation import generate, load
from tra.runs import load_run, train


def test_run_and_exported_folder_generate_the_same(language_run: Path, exported: Path) -> None:
    texts = [
        generate(*load(folder), "The river", seed=3, stream=False, max_new_tokens=12, do_sample=True)["text"]
        for folder in (language_run, exported)
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
    result = generate(*load(language_run), "In 1847 the", seed=0, stream=False, max_new_tokens=15, do_sample=False)
    assert result["text"] == task.text(tokens[length:])
    assert result["new_tokens"] == 15
    assert result["prompt_tokens"] == length
    assert result["tokens_per_second"] > 0


def test_nothing_is_added_to_a_prompt(language_run: Path) -> None:
    model, tokenizer = load(language_run)
    end = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = end
    assert tokenizer("The river")["input_ids"][-1] == 0
    assert generate(model, tokenizer, "The river", seed=0, stream=False, max_new_tokens=1)["prompt_tokens"] == len(
        tokenizer("The river", add_special_tokens=False)["input_ids"]
    )


def test_text_is_shown_while_it_comes(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step of the model, what was there of the text before it."""
    shown, out = [], io.StringIO()
    forward = TraForCausalLM.forward

    def watched(*arguments: Any, **options: Any) -> Any:
        shown.append(out.getvalue())
        return forward(*arguments, **options)

    model, tokenizer = load(exported)
    monkeypatch.setattr(TraForCausalLM, "forward", watched)
    monkeypatch.setattr("sys.stdout", out)
    text = generate(model, tokenizer, "The river", 0, True, max_new_tokens=40, do_sample=True)["text"]
    assert out.getvalue() == text + "\n"
    assert len(shown) == 40
    assert shown[0] == ""
    assert len(set(shown)) > 5
    assert all(text.startswith(part) for part in shown)


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

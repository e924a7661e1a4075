"""A run as a folder for transformers, and text generated from either."""

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.faults import full_disk
from tests.language_run import SENTENCES, text_recipe, write_text
from tra.cli import main
from tra.export import export
from tra.generation import generate, load
from tra.hub import TraForCausalLM
from tra.recipes import RECIPES
from tra.runs import load_model, load_recipe
from tra.training import train


@pytest.fixture(scope="module")
def exported(language_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(language_run, folder)
    return folder


def test_exported_model_and_tokenizer_are_those_of_the_run(language_run: Path, exported: Path) -> None:
    assert {path.suffix for path in exported.iterdir()} == {".json", ".md", ".safetensors"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    assert isinstance(model, TraForCausalLM)
    decoder, _ = load_model(language_run)
    text = "The river rises , 1847 ß\n\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    tokens, _ = load_recipe(language_run).build_task().read(text)
    assert ids[0].tolist() == tokens.tolist()
    assert tokenizer.decode(ids[0]) == text
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, decoder(ids))
    assert tokenizer.padding_side == "left"
    assert tokenizer.bos_token is None, "training on text puts nothing before it"
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer("<|endoftext|>")["input_ids"][0]


def test_card_holds_recipe_and_results(language_run: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    recipe = re.search(r"```json\n(.*?)```", card, re.DOTALL)
    assert recipe is not None
    assert json.loads(recipe.group(1)) == json.loads((language_run / "recipe.json").read_text())
    measured = json.loads((language_run / "results.json").read_text())["results"]
    for result in measured:
        assert f"{result['perplexity']:.2f}" in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_an_existing_folder_is_left_alone(
    language_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["export", str(language_run), str(tmp_path / "mine")]) == 2
    assert "folder must not exist yet" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_nothing_is_left_of_an_export_that_fails(
    language_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tra.export.model_card", fail)
    with pytest.raises(RuntimeError, match=r"could not write .*No space left"):
        export(language_run, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(
    language_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(20_000):
        assert main(["export", str(language_run), str(tmp_path / "model")]) == 1
    assert re.fullmatch(r"tra: error: could not write .*model: .*File too large.*\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_card_says_whose_the_results_are(language_run: Path, tmp_path: Path) -> None:
    shutil.copytree(language_run, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "whole")
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "trained with threshold-relative-attention on text in windows of 16 tokens, for 30 of 30 steps." in card
    assert "Measured on text, with " in card
    stored = tmp_path / "run" / "results.json"
    content = json.loads(stored.read_text())
    for name, other in (("another step", {"step": 10}), ("nothing", {"results": []})):
        stored.write_text(json.dumps({**content, **other}))
        export(tmp_path / "run", tmp_path / name)
        assert "## Results\n\nNothing was measured.\n" in (tmp_path / name / "README.md").read_text()


def test_export_of_an_unfinished_run_says_so(tmp_path: Path, language_run: Path) -> None:
    shutil.copytree(language_run, tmp_path / "run")
    recipe = replace(load_recipe(language_run), steps=31)
    (tmp_path / "run" / "recipe.json").write_text(recipe.to_json())
    with pytest.warns(UserWarning, match="the run is at step 30 of 31"):
        export(tmp_path / "run", tmp_path / "model")
    assert "for 30 of 31 steps." in (tmp_path / "model" / "README.md").read_text()


def test_a_run_on_a_task_is_exported_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = RECIPES["flip-flop-small"]()
    recipe = replace(whole, steps=2, batch=4, length=16, model=replace(whole.model, layers=1, width=16), evaluations=())
    train(recipe, tmp_path / "run", console=Console(quiet=True))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    assert "token i is the i-th of `" in (tmp_path / "model" / "README.md").read_text()
    assert not (tmp_path / "model" / "tokenizer.json").exists()
    decoder, _ = load_model(tmp_path / "run")
    tokens = torch.randint(6, (2, 9))
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(tokens).logits
        assert torch.equal(logits, decoder(tokens))
    for folder in ("run", "model"):
        assert main(["generate", str(tmp_path / folder), "--prompt", "w1"]) == 2
        assert "tokenizer" in capsys.readouterr().err


def test_run_and_exported_folder_generate_the_same(language_run: Path, exported: Path) -> None:
    texts = [
        generate(*load(folder), "The river", seed=3, stream=False, max_new_tokens=12, do_sample=True)["text"]
        for folder in (language_run, exported)
    ]
    assert texts[0] == texts[1] != ""


def test_greedy_text_is_the_most_probable_by_a_plain_loop(language_run: Path) -> None:
    decoder, _ = load_model(language_run)
    task = load_recipe(language_run).build_task()
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


def test_generate_streams_text_and_prints_speed(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(exported), "--prompt", "The river", "--tokens", "9", "--temperature", "0"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(r"\d+ tokens read in [\d.]+ s, 9 new at [\d.]+ tokens/s\n", shown.err)
    assert main([*command, "--json"]) == 0
    assert shown.out == "The river" + json.loads(capsys.readouterr().out)["text"] + "\n"


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


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_beams": 1, "max_new_tokens": 100}),
        (
            ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--tokens", "7", "--seed", "4"],
            {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "num_beams": 1, "max_new_tokens": 7},
        ),
        (["--temperature", "0"], {"num_beams": 1, "max_new_tokens": 100}),
        (["--beams", "3"], {"num_beams": 3, "max_new_tokens": 100}),
    ],
)
def test_options_reach_the_model(
    options: list[str], expected: dict[str, Any], exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Any, __: Any, prompt: str, seed: int, ___: bool, **given: Any) -> None:
        assert given == expected
        assert seed == (4 if "--seed" in options else 0)
        assert prompt == "@home"
        raise KeyboardInterrupt

    monkeypatch.setattr("tra.generation.generate", stop)
    assert main(["generate", str(exported), "--prompt", "@@home", *options]) == 130


def test_prompt_longer_than_the_training_window_from_a_file(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text(SENTENCES * 20)
    command = ["generate", str(exported), "--prompt", f"@{tmp_path / 'prompt.txt'}", "--tokens", "3", "--json"]
    assert main([*command, "--beams", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_tokens"] > 10 * 16
    assert result["new_tokens"] == 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--tokens", "0"], "tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "temperature must be at least 0, got -1.0"),
        (["--temperature", "nan"], "temperature must be at least 0, got nan"),
        (["--beams", "2", "--top-p", "0.5"], "beams must be 1 for temperature, top_k and top_p to matter, got 2"),
        (["--prompt", "@home sweet"], "prompt must be text, @@ before what begins with @, or @ and a file: "),
        (["--top-p", "0"], r"top_p must be in (0, 1], got 0.0"),
        (["--beams", "0"], "beams must be at least 1, got 0"),
        (["--prompt", ""], "prompt must have at least one token, got ''"),
    ],
)
def test_wrong_options_are_named(
    exported: Path, wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(exported), "--prompt", "The", *wrong]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_neither_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "The"]) == 2
    assert "recipe.json (a run) or config.json (exported)" in capsys.readouterr().err


def without(file: Path, key: str) -> None:
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})


def changed(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


FOREIGN = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: cut(folder / "model.safetensors"), "incomplete|Incomplete|invalid|deserializing"),
        (lambda folder: cut(folder / "tokenizer.json"), r".+"),
        (lambda folder: cut(folder / "config.json"), r".+"),
        (
            lambda folder: without(folder / "model.safetensors", "decoder.blocks.1.attention.gate.weight"),
            "config.json and the weights do not belong together: decoder.blocks.1.attention.gate.weight is in one only",
        ),
        (
            lambda folder: changed(folder / "config.json", attention="rope"),
            "config.json and the weights do not belong together: decoder.blocks.0.attention.gate.bias is in one only",
        ),
        (lambda folder: changed(folder / "config.json", **FOREIGN), "the model is one of type 'evil'"),
        (lambda folder: changed(folder / "config.json", model_type="gpt2"), "the model is one of type 'gpt2'"),
        (
            lambda folder: changed(
                folder / "tokenizer_config.json",
                tokenizer_class="Evil",
                auto_map={"AutoTokenizer": [None, "evil.Evil"]},
            ),
            r".+",
        ),
    ],
    ids=["weights cut", "tokenizer cut", "config cut", "weights missing", "other weights", "code", "gpt2", "tokenizer"],
)
def test_a_damaged_or_foreign_folder_is_one_line_and_none_of_its_code_runs(
    damage: Callable[[Path], None],
    message: str,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(exported, folder)
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    damage(folder)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to whoever asks whether to trust
    assert main(["generate", str(folder), "--prompt", "The"]) == 1
    assert not ran.exists()
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"tra: error: could not load {folder}: .*({message})", error)


def test_a_run_needs_neither_its_text_nor_the_cache_any_more(
    language_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(language_run, tmp_path / "run")
    recipe = (tmp_path / "run" / "recipe.json").read_text()
    (tmp_path / "run" / "recipe.json").write_text(recipe.replace("/text", "/gone"))
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "empty"))
    assert main(["inspect", str(tmp_path / "run"), "--text", "The river", "--json"]) == 0
    capsys.readouterr()
    texts = []
    for run in (tmp_path / "run", language_run):
        assert main(["generate", str(run), "--prompt", "The river", "--tokens", "5", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != ""
    assert not (tmp_path / "empty").exists()


def test_a_run_does_not_go_on_with_the_tokenizer_of_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    recipe = replace(text_recipe(write_text(tmp_path / "text")), steps=2)
    train(recipe, tmp_path / "run", console=Console(quiet=True))
    before = (tmp_path / "run" / "tokenizer.json").read_text()
    (tmp_path / "text" / "train.txt").write_text("another text altogether , without any river\n" * 50)
    with pytest.raises(ValueError, match=r"text must be that on which the run in .* began"):
        train(recipe, tmp_path / "run", console=Console(quiet=True))
    assert (tmp_path / "run" / "tokenizer.json").read_text() == before

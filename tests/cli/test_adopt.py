"""`tra adopt`."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from tests.cli.calling import Captured, fails, shows
from tests.hub.families import build_family, tokens_of
from tests.language_run import SENTENCES, write_text
from tra.cli import main
from tra.hub import adopt


def test_the_folder_is_the_model_with_tra(tmp_path: Path, capsys: Captured) -> None:
    original = build_family("llama")
    original.save_pretrained(tmp_path / "original")
    words = ["--layers", "0", "2", "--gate-bias", "1.5", "--threshold", "head", "--drop-positions"]
    shown = shows(["adopt", str(tmp_path / "original"), str(tmp_path / "new" / "adopted"), *words], capsys)
    assert shown == f"{tmp_path / 'new' / 'adopted'}\n"
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "adopted")
    expected, tokens = adopt(original, layers=[0, 2], gate_bias=1.5, threshold="head", drop_positions=True), tokens_of()
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, expected(tokens).logits)
    assert found.config.tra == expected.config.tra


def test_a_wrong_argument_is_one_line_and_writes_nothing(tmp_path: Path, capsys: Captured) -> None:
    build_family("llama").save_pretrained(tmp_path / "original")
    model, folder = str(tmp_path / "original"), str(tmp_path / "adopted")
    assert fails(["adopt", model], capsys) == "FOLDER must be given; see tra adopt --help"
    assert fails(["adopt", model, model], capsys) == f"folder must not exist yet, got {model}"
    assert "layers must hold layers from 0 to 2, got 7" in fails(["adopt", model, folder, "--layers", "7"], capsys)
    assert fails(["adopt", str(tmp_path / "nothing"), folder], capsys).startswith("model must be a folder or a name")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_a_run_of_this_package_is_refused_with_what_to_do_instead(
    finished_run: Path, tmp_path: Path, capsys: Captured
) -> None:
    for run in (str(finished_run), "pretrained:flip-flop"):
        message = fails(["adopt", run, str(tmp_path / "adopted")], capsys)
        assert message.startswith(f"model must be one of transformers, but {run} is a run of this package")
        assert message.endswith("tra train RECIPE --attention tra")
    assert not list(tmp_path.iterdir())


def word_llama(folder: Path) -> Any:
    """A Llama of one layer with a tokenizer of words, saved."""
    words = {word: index for index, word in enumerate(dict.fromkeys(["?", *SENTENCES.split()]))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(folder)
    model = build_family("llama", num_hidden_layers=1)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def loss_of(folder: Path) -> float:
    """Of the sentences, by transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES * 2, return_tensors="pt").input_ids
    return model(tokens, labels=tokens).loss.item()


def test_an_adopted_model_is_healed_on_text_and_goes_on(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    word_llama(tmp_path / "original")
    text = str(write_text(tmp_path / "text"))
    plain, healed, again = (tmp_path / name for name in ("plain", "healed", "again"))
    shows(["adopt", str(tmp_path / "original"), str(plain)], capsys)
    how = ["--heal", text, "--length", "16", "--batch", "4", "--learning-rate", "1e-2"]
    shown = shows(["adopt", str(tmp_path / "original"), str(healed), *how, "--steps", "12"], capsys)
    assert "healed for 12 steps: loss " in shown
    assert shown.splitlines()[-1] == str(healed)
    shows(["adopt", str(healed), str(again), *how, "--steps", "12", "--seed", "1"], capsys)
    assert loss_of(again) < loss_of(healed) < loss_of(plain) - 0.5
    gates = [
        transformers.AutoModelForCausalLM.from_pretrained(at).model.layers[0].self_attn.tra for at in (plain, healed)
    ]
    assert not torch.equal(gates[0].gate_weight, gates[1].gate_weight)
    assert not torch.equal(gates[0].threshold_weight, gates[1].threshold_weight)
    for words, message in (
        ([*how, "--gate-bias", "1"], "gate_bias must be left out for a model that is adopted already"),
        ([], "model must not be adopted already, got TraLlamaForCausalLM: unadopt it first"),
        (["--steps", "3"], "heal must be given with steps: the text to train on"),
        ([*how, "--steps", "0"], "steps must be at least 1, got 0"),
        ([*how, "--learning-rate", "2"], "learning_rate must be between 0 and 1, got 2.0"),
        ([*how, "--length", "100000"], "length must be less than the "),
        (["--heal", "nowhere"], "text must be a folder of "),
    ):
        assert message in fails(["adopt", str(healed), str(tmp_path / "wrong"), *words], capsys)
    damaged = transformers.AutoModelForCausalLM.from_pretrained(healed)
    with torch.no_grad():
        damaged.lm_head.weight.fill_(torch.inf)
    damaged.save_pretrained(healed)  # its loss is not finite
    assert main(["adopt", str(healed), str(tmp_path / "wrong"), *how, "--steps", "1"]) == 1
    assert "tra: error: healing diverged: the loss of the last step is nan; try" in capsys.readouterr().err
    (tmp_path / "original" / "tokenizer.json").unlink()
    (tmp_path / "original" / "tokenizer_config.json").unlink()
    message = fails(["adopt", str(tmp_path / "original"), str(tmp_path / "wrong"), *how], capsys)
    assert message.startswith("model must have a fast tokenizer")
    assert not (tmp_path / "wrong").exists()

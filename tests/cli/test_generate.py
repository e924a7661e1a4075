"""`tra generate`."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.cli.calling import Captured, fails, shows
from tests.language_run import SENTENCES
from tra import Sampling
from tra.cli import main
from tra.hub import TraForCausalLM
from tra.hub import generation as hub_generation


def test_generate_streams_text_and_prints_speed(exported: Path, capsys: Captured) -> None:
    command = ["generate", str(exported), "--prompt", "The river", "--tokens", "9", "--temperature", "0"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(r"\d+ tokens read in [\d.]+ s, 9 new at [\d.]+ tokens/s\n", shown.err)
    assert main([*command, "--json"]) == 0
    assert shown.out == "The river" + last_line(capsys)["text"] + "\n"


def test_a_saved_cache_goes_on_where_the_text_ended(exported: Path, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "cache.safetensors"
    greedy = ["--tokens", "6", "--temperature", "0", "--json"]
    main(["generate", str(exported), "--prompt", "The river", *greedy, "--save-cache", str(file)])
    first = last_line(capsys)["text"]
    main(["generate", str(exported), "--prompt", " and", *greedy, "--cache", str(file)])
    continued = last_line(capsys)
    assert continued["prompt_tokens"] < 5
    main(["generate", str(exported), "--prompt", f"The river{first} and", *greedy])
    assert continued["text"] == last_line(capsys)["text"]
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    wrong = ["generate", str(other), "--prompt", " and", "--json", "--cache", str(file)]
    assert "is the cache of another weights" in fails(wrong, capsys, 1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "is the cache of another tokenizer" in fails(wrong, capsys, 1)
    file.write_bytes(file.read_bytes()[:100])
    wrong[1] = str(exported)
    assert "is no intact cache" in fails(wrong, capsys, 1)


def test_a_place_where_no_cache_can_be_saved_is_named_before_anything_is_written(
    exported: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    for name, reason in (("thesis", "something that is no file has this name"), ("no/cache", "there is no folder")):
        command = ["generate", str(exported), "--prompt", "The", "--json", "--save-cache", str(tmp_path / name)]
        assert f"could not write the cache {tmp_path / name}: {reason}" in fails(command, capsys, 1)
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"


@pytest.mark.parametrize(
    "options, new, sampling, beams",
    [
        ([], 100, Sampling(1.0), 1),
        (["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--tokens", "7"], 7, Sampling(0.7, 5, 0.9), 1),
        (["--temperature", "0", "--seed", "4"], 100, Sampling(0.0), 1),
        (["--beams", "3"], 100, Sampling(0.0), 3),
    ],
)
def test_options_reach_the_model(
    options: list[str], new: int, sampling: Sampling, beams: int, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Any, __: Any, *given: Any, show: Any, **more: Any) -> None:
        assert given == ("@home", new, sampling)
        assert more == {"beams": beams, "seed": 4 if "--seed" in options else 0, "cache": None, "save_cache": None}
        raise KeyboardInterrupt

    monkeypatch.setattr("tra.hub.generation.generate", stop)
    assert main(["generate", str(exported), "--prompt", "@@home", *options]) == 130


def test_a_folder_that_asks_for_more_is_left_to_transformers(exported: Path, tmp_path: Path, capsys: Captured) -> None:
    """Its own settings hold, and they decide nothing that the command does."""
    texts = []
    for settings in ({}, {"do_sample": True, "top_k": 3}, {"repetition_penalty": 5.0}, {"suppress_tokens": [0]}):
        folder = tmp_path / f"model-{len(texts)}"
        shutil.copytree(exported, folder)
        changed(folder / "generation_config.json", **settings)
        command = ["generate", str(folder), "--prompt", "The river", "--tokens", "30", "--temperature", "0"]
        assert main(command) == 0
        shown = capsys.readouterr()
        assert main([*command, "--json"]) == 0
        texts.append(last_line(capsys)["text"])
        assert shown.out == f"The river{texts[-1]}\n"
        model, tokenizer = TraForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("The river", return_tensors="pt")["input_ids"]
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert texts[-1] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert texts[0] == texts[1]
    assert texts[2] != texts[0], "the penalty means something"


def test_prompt_longer_than_the_training_window_from_a_file(exported: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "prompt.txt").write_text(SENTENCES * 20)
    command = ["generate", str(exported), "--prompt", f"@{tmp_path / 'prompt.txt'}", "--tokens", "3", "--json"]
    assert main([*command, "--beams", "2"]) == 0
    result = last_line(capsys)
    assert result["prompt_tokens"] > 10 * 16
    assert result["new_tokens"] == 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--tokens", "0"], "tokens must be between 1 and 1,073,741,824, got 0"),
        (["--tokens", str(10**30)], "tokens must be between 1 and 1,073,741,824, got 1"),
        (["--seed", str(10**30)], "seed must be a whole number of 64 bits, got 1"),
        (["--seed", "-9223372036854775809"], "seed must be a whole number of 64 bits, got -9223372036854775809"),
        (["--temperature", "1e-300"], "temperature must be 0 or at least 1e-06, got 1e-300"),
        (["--temperature", "-1"], "temperature must be 0 or at least 1e-06, got -1.0"),
        (["--temperature", "nan"], "temperature must be a finite number, got 'nan'"),
        (["--beams", "2", "--top-p", "0.5"], "beams must be 1 for temperature, top_k and top_p to matter, got 2"),
        (["--prompt", "@home sweet"], "prompt must be text, @@ before what begins with @, or @ and a file: "),
        (["--top-p", "0"], r"top_p must be in (0, 1], got 0.0"),
        (["--beams", "0"], "beams must be between 1 and 1,024, got 0"),
        (["--beams", "1000000"], "beams must be between 1 and 1,024, got 1000000"),
        (["--prompt", ""], "prompt must have at least one token, got ''"),
    ],
)
def test_wrong_options_are_named(exported: Path, wrong: list[str], message: str, capsys: Captured) -> None:
    assert main(["generate", str(exported), "--prompt", "The", *wrong]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("how", [[], ["--temperature", "0"], ["--beams", "2"]], ids=["sampled", "greedy", "beams"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_give_no_text(
    how: list[str], bad: float, exported: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.decoder.norm.weight"][0] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["generate", str(folder), "--prompt", "The", "--json", *how]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(
        r"tra: error: the model's scores for token \d+ are not finite: its weights are damaged\n", shown.err
    )


def test_a_folder_that_is_neither_is_refused(tmp_path: Path, capsys: Captured) -> None:
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
            lambda folder: without(folder / "model.safetensors", "model.decoder.blocks.1.attention.gate.weight"),
            "config.json and the weights do not belong together: .*blocks.1.attention.gate.weight is in one only",
        ),
        (
            lambda folder: changed(folder / "config.json", attention="rope"),
            "config.json and the weights do not belong together: .*blocks.0.attention.gate.bias is in one only",
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
    capsys: Captured,
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
    language_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
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
        texts.append(last_line(capsys)["text"])
    assert texts[0] == texts[1] != ""
    assert not (tmp_path / "empty").exists()


def test_a_run_on_a_task_has_no_text(finished_run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["export", str(finished_run), str(tmp_path / "model")]) == 0
    for folder in (finished_run, tmp_path / "model"):
        assert "tokenizer" in fails(["generate", str(folder), "--prompt", "w1"], capsys)


def last_line(capsys: Captured) -> dict[str, Any]:
    """What --json says at its end."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_json_comes_piece_by_piece(exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A line as soon as there is text, and the whole of it at the end."""
    when: list[int] = []
    original = hub_generation.written

    def written(*arguments: Any, **options: Any) -> Iterator[tuple[int | None, str]]:
        for token, piece in original(*arguments, **options):
            when.append(len(capsys.readouterr().out.splitlines()))
            yield token, piece

    command = ["generate", str(exported), "--prompt", "The river", "--tokens", "6", "--json"]
    assert main(command) == 0
    *pieces, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert "".join(line["piece"] for line in pieces) == last["text"]
    assert len(pieces) > 1
    assert last["new_tokens"] == 6
    monkeypatch.setattr(hub_generation, "written", written)
    assert main(command) == 0
    assert 1 in when[1:], "printed before the next token was made"


def test_a_prompt_from_a_file_is_printed_if_asked_for(exported: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "prompt.txt").write_text("The river")
    command = ["generate", str(exported), "--tokens", "3", "--prompt"]
    whole = shows([*command, "The river"], capsys)
    assert whole.startswith("The river")
    assert shows([*command, f"@{tmp_path / 'prompt.txt'}"], capsys) == whole.removeprefix("The river")
    assert shows([*command, f"@{tmp_path / 'prompt.txt'}", "--echo"], capsys) == whole

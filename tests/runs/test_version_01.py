"""Run folders that version 0.1 wrote: they load, are measured, and go on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.text.reading import prose, write_folder
from tra.model import Decoder, DecoderConfig
from tra.recipes import Evaluation, Recipe
from tra.runs import evaluate, load_run, train
from tra.tasks import ExactMatch
from tra.text import Text

MODEL = {
    **{"vocabulary": 300, "layers": 1, "heads": 2, "width": 16, "kv_heads": 1, "attention": "tra", "qk_norm": True},
    **{"dropout": 0.0, "residual": "normalised"},
}
RECIPE = {
    **{"name": "old", "model": MODEL, "task": "flip_flop", "length": 16, "steps": 3, "batch": 4},
    **{"learning_rate": 0.002, "seed": 3, "text": None, "alphabet": None, "data": "fresh", "examples": None},
    **{"warmup": 0.05, "beta2": 0.95, "weight_decay": 0.01, "clip": 1.0, "accumulate": 1, "precision": "no"},
    **{"gradient_checkpointing": False, "log_every": 1, "checkpoint_every": 3, "keep_checkpoints": 2},
    "evaluations": [{"name": "iid", "length": 16, "examples": 4, "stride": None}],
}
RESULTS = {
    **{"step": 3, "steps": 3, "task": "flip_flop", "task_version": 1, "environment": {"tra": "0.1.0"}},
    "results": [
        {"set": "iid", "length": 16, "examples": 4, "exact_match": 0.75, "token_accuracy": 0.9, "loss": 0.1},
    ],
}


def write(folder: Path, recipe: dict[str, Any], results: dict[str, Any] | None) -> Decoder:
    """A finished run; returns its model."""
    last = folder / "checkpoints" / "step-00000003"
    last.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    lines = ({"step": step, "loss": 1.0, "gradient_norm": 2.0, "learning_rate": 0.001} for step in (1, 2, 3))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results))
    options = {} if recipe["model"]["qk_norm"] else {"qk_norm": False}
    fields = {name: value for name, value in recipe["model"].items() if name != "qk_norm"}
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**fields, attention_options=options))
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    moments = {
        f"{kind}/{name}": torch.zeros_like(x) for kind in ("exp_avg", "exp_avg_sq") for name, x in weights.items()
    }
    steps = {f"step/{name}": torch.tensor(3.0) for name in weights}
    files = {"model.safetensors": weights, "optimizer.safetensors": {**moments, **steps}}
    for name, tensors in files.items():
        save_file(tensors, last / name)
    digests = {name: hashlib.sha256((last / name).read_bytes()).hexdigest() for name in files}
    (last / "state.json").write_text(json.dumps({"format": 1, "step": 3, "files": digests}))
    return model


def test_a_finished_run_is_read_measured_and_not_touched(tmp_path: Path) -> None:
    model = write(tmp_path, RECIPE, RESULTS)
    run = load_run(tmp_path)
    assert run.results == [ExactMatch("iid", 16, 4, None, 0.1, None, 0.75, 0.9)]
    assert run.finished(run.recipe) == run.results
    assert (run.step, run.steps_done()) == (3, 3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], tensor)
    (measured,) = evaluate(run)
    assert (measured.set, measured.length, measured.examples) == ("iid", 16, 4)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json*")}
    train(run.recipe, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json*")} == before


@pytest.mark.parametrize("task, alphabet, name", [("copy_unique", 40, "copy"), ("instructed", None, "all")])
def test_an_alphabet_is_an_option_of_the_task(tmp_path: Path, task: str, alphabet: int | None, name: str) -> None:
    sets = [{"name": name, "length": 8, "examples": 4}]
    write(tmp_path, {**RECIPE, "task": task, "alphabet": alphabet, "evaluations": sets}, None)
    assert load_run(tmp_path).task.alphabet == (alphabet or 100)
    assert load_run(tmp_path).finished(load_run(tmp_path).recipe) is None


def test_qk_norm_is_an_option_of_the_mechanism(tmp_path: Path) -> None:
    write(tmp_path, {**RECIPE, "model": {**MODEL, "qk_norm": False}}, None)
    assert load_run(tmp_path).recipe.model.attention_options == {"qk_norm": False}
    assert load_run(tmp_path).model.config.label == "tra qk_norm=False"


def test_a_run_that_was_not_finished_goes_on(tmp_path: Path) -> None:
    write(tmp_path, {**RECIPE, "steps": 5}, None)
    run = train(load_run(tmp_path).recipe, tmp_path)
    assert [entry["step"] for entry in run.metrics()] == [1, 2, 3, 4, 5]
    assert len(run.results) == 1
    (entry,) = json.loads((tmp_path / "environment.json").read_text())
    assert entry["from_step"] == 3


def test_a_run_on_text_is_measured_with_the_tokenizer_it_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRA_DATA", raising=False)
    text = write_folder(tmp_path / "text", prose(1, 900), prose(2, 300))
    recipe = {
        **RECIPE,
        "task": "text",
        "text": {"train": str(text), "evaluation": None, "tokenizer": "bpe-300"},
        "evaluations": [{"name": "valid", "length": 16, "examples": 4, "stride": None}],
    }
    write(tmp_path / "run", recipe, None)
    trained_with = Text(str(text), None, "bpe-300").tokenizer
    (tmp_path / "run" / "tokenizer.json").write_text(trained_with.to_str(pretty=True))
    run = load_run(tmp_path / "run")
    assert run.recipe == Recipe(
        name="new",
        model=DecoderConfig(vocabulary=300, layers=1, heads=2, width=16, kv_heads=1, dropout=0.0),
        task="text",
        task_options={"train": str(text), "tokenizer": "bpe-300"},
        **{name: RECIPE[name] for name in ("length", "steps", "batch", "learning_rate", "seed", "beta2")},
        **{name: RECIPE[name] for name in ("log_every", "checkpoint_every")},
        evaluations=(Evaluation("valid", 16, 4),),
    )
    (measured,) = evaluate(run)
    assert measured.tokens == 64
    assert 100 < measured.perplexity < 900
    (text / "train.txt").write_text("another text gives another tokenizer " * 99)
    assert evaluate(tmp_path / "run") == [measured]

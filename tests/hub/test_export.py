"""A run as a folder for transformers."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tra.hub import TraForCausalLM
from tra.hub.export import export
from tra.recipes import build_recipe
from tra.runs import Run, load_run, train


def test_exported_model_and_tokenizer_are_those_of_the_run(language_run: Path, exported: Path) -> None:
    assert {path.suffix for path in exported.iterdir()} == {".json", ".md", ".safetensors", ".py"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    assert isinstance(model, TraForCausalLM)
    decoder = load_run(language_run).model
    text = "The river rises , 1847 ß\n\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    tokens, _ = load_run(language_run).task.read(text)
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


def test_nothing_is_left_of_an_export_that_fails(
    language_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tra.hub.export.model_card", fail)
    with pytest.raises(RuntimeError, match=r"could not write .*No space left"):
        export(language_run, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_card_says_whose_the_results_are(language_run: Path, tmp_path: Path) -> None:
    shutil.copytree(language_run, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "whole")
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "trained with threshold-relative-attention on text at up to 16 tokens, for 30 of 30 steps." in card
    assert "Measured on text, with " in card
    stored = tmp_path / "run" / "results.json"
    content = json.loads(stored.read_text())
    for name, other in (("another step", {"step": 10}), ("nothing", {"results": []})):
        stored.write_text(json.dumps({**content, **other}))
        export(tmp_path / "run", tmp_path / name)
        assert "## Results\n\nNothing was measured.\n" in (tmp_path / name / "README.md").read_text()


def test_export_of_an_unfinished_run_says_so(tmp_path: Path, language_run: Path) -> None:
    shutil.copytree(language_run, tmp_path / "run")
    recipe = replace(load_run(language_run).recipe, steps=31)
    (tmp_path / "run" / "recipe.json").write_text(recipe.to_json())
    with pytest.warns(UserWarning, match="the run is at step 30 of 31"):
        export(tmp_path / "run", tmp_path / "model")
    assert "for 30 of 31 steps." in (tmp_path / "model" / "README.md").read_text()


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on a task, of a mechanism with options."""
    whole = build_recipe("flip-flop-small", "rope")
    model = replace(whole.model, layers=1, width=16, attention_options={"theta": 100.0})
    recipe = replace(whole, steps=2, batch=4, length=16, model=model, evaluations=whole.evaluations[:1])
    return train(recipe, tmp_path_factory.mktemp("task") / "run")


@torch.inference_mode()
def test_a_run_on_a_task_is_exported_without_a_tokenizer(task_run: Run, tmp_path: Path) -> None:
    export(task_run, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "token i is the i-th of `" in card
    assert "AutoTokenizer" not in card
    assert "Measured with " in card
    assert not (tmp_path / "model" / "tokenizer.json").exists()
    tokens = torch.randint(6, (2, 9))
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(tokens).logits
    assert torch.equal(logits, load_run(task_run.folder).model(tokens))


def test_a_run_and_its_folder_are_exported_alike(task_run: Run, tmp_path: Path) -> None:
    export(task_run, tmp_path / "one" / "model")
    export(str(task_run.folder), tmp_path / "other" / "model")
    for file in (tmp_path / "one" / "model").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / "model" / file.name).read_bytes(), file.name


def test_options_of_the_mechanism_are_in_config_and_card(task_run: Run, tmp_path: Path) -> None:
    export(task_run, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["attention_options"] == {"theta": 100.0}
    assert "with rope theta=100 attention" in (tmp_path / "model" / "README.md").read_text()


def test_the_example_of_a_card_runs(task_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(task_run, tmp_path / "model")
    example = re.search(r"```python\n(.*?)```", (tmp_path / "model" / "README.md").read_text(), re.DOTALL)
    assert example is not None
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    exec(example.group(1), found)
    assert isinstance(found["model"], TraForCausalLM)


LOADS = """
import sys
import transformers
assert "tra" not in sys.modules
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__ == "tra.hub.modeling", type(model)
model.save_pretrained(sys.argv[2])
classifier = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[2], trust_remote_code=True)
print(type(classifier).__name__, transformers.AutoTokenizer.from_pretrained(sys.argv[1]).eos_token)
"""


def in_another_process(program: str, *arguments: object, **surroundings: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **surroundings}, check=False)


def test_a_tool_that_knows_a_folder_only_finds_the_package(exported: Path, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "home")}
    done = in_another_process(LOADS, exported, tmp_path / "again", **home)
    assert done.stdout.split() == ["TraForSequenceClassification", "<|endoftext|>"], done.stderr
    assert (tmp_path / "again" / "tra_model.py").read_text() == (exported / "tra_model.py").read_text()
    assert [file.name for file in (tmp_path / "again").glob("*.py")] == ["tra_model.py"]
    assert "--" not in (tmp_path / "again" / "config.json").read_text(), "it leads to no other folder"
    # Without the package, one line says what to install.
    hidden = "import sys; sys.modules['tra'] = None\n" + LOADS.replace('assert "tra" not in sys.modules', "")
    done = in_another_process(hidden, exported, tmp_path / "none", **home)
    assert done.returncode == 1
    assert (
        "this model needs a package: pip install '.[hub]' in a clone of threshold-relative-attention"
        in done.stderr.splitlines()[-1]
    )


def test_a_folder_without_the_file_that_leads_here(task_run: Run, tmp_path: Path) -> None:
    export(task_run, tmp_path / "model", auto_map=False)
    assert {path.suffix for path in (tmp_path / "model").iterdir()} == {".json", ".md", ".safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "model" / "config.json").read_text())
    card = (tmp_path / "model" / "README.md").read_text()
    assert "trust_remote_code" not in card
    assert "pip install '.[hub]'  # in a clone of threshold-relative-attention" in card


def test_the_card_says_how_to_tune_and_to_evaluate(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert "lm_eval --model hf --model_args pretrained=model,trust_remote_code=True,max_length=64 " in card
    layers = re.search(r"all of them are ((?:`\w+`,? ?)+)", card.replace("\n", " "))
    assert layers is not None
    model = AutoModelForCausalLM.from_pretrained(exported)
    linear = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(re.findall(r"`(\w+)`", layers.group(1))) == linear - {"gate", "lm_head"}

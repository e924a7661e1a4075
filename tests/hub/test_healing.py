"""Healing of adopted models; the tables of docs/adopt.md are those of the stored results."""

import importlib
import json
import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from tests.hub.families import build_family
from tests.hub.test_generation import word_tokenizer
from tra.cli import main
from tra.hub import adopt
from tra.hub.healing import Healing, heal

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "results" / "healing"
FILE, FILE_OF_KEYS = (ROOT / "benchmarks" / name for name in ("healing.py", "healing_keys.py"))


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("healing"), importlib.import_module("healing_keys")


def rows_in(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["results"]


def test_the_page_on_adopting_shows_what_is_stored(files: tuple[ModuleType, ModuleType]) -> None:
    healing, keys = files
    page = (ROOT / "docs" / "adopt.md").read_text()
    rows = rows_in(STORED / "results.json")
    reported = [row for row in rows if row["setting"] in healing.SETTINGS]
    choices = [row for row in rows if row["setting"] in healing.CHOICES]
    seeds = Counter((row["setting"], row["steps"]) for row in reported)
    assert all(seeds[name, steps] == 3 for name in healing.SETTINGS for steps in (0, 50, 200, 1000))
    assert len(choices) == len(healing.CHOICES)
    assert healing.table(reported).markdown() in page
    assert healing.differences(reported, healing.WINDOWED).markdown() in page
    assert healing.table(choices).markdown() in page
    found = rows_in(STORED / "keys.json")
    assert {row["setting"] for row in found} == healing.SETTINGS.keys() | keys.OWN.keys()
    assert keys.table(found).markdown() in page


def test_tables_of_healing_are_made_from_what_is_stored(tmp_path: Path) -> None:
    for name, file in {"results": FILE, "keys": FILE_OF_KEYS}.items():
        shutil.copy(STORED / f"{name}.json", tmp_path)
        assert main(["reproduce", str(file), "--no-train", "--output", str(tmp_path)]) == 0
    for made, stored in {"table.md": "table.md", "keys.md": "keys.md"}.items():
        assert (tmp_path / made).read_text() == (STORED / stored).read_text()


def test_healing_is_an_experiment_that_goes_on_where_it_stopped(
    files: tuple[ModuleType, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healing, _ = files
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("".join(f"word{number % 97} and {number}\n" for number in range(1500)))
    command = ["reproduce", str(FILE), "--scale", "smoke", "--output", str(tmp_path / "out")]
    command += ["--set", f"task_options.train={tmp_path}"]
    assert main([*command, "--columns", "0"]) == 0
    first = rows_in(tmp_path / "out" / "results.json")
    assert [row["setting"] for row in first] == list(healing.SETTINGS)
    assert main(command) == 0
    rows = rows_in(tmp_path / "out" / "results.json")
    assert rows[: len(first)] == first
    assert [(row["setting"], row["steps"]) for row in rows[len(first) :]] == [(name, 2) for name in healing.SETTINGS]
    of = {(row["setting"], row["steps"]): row["perplexity"] for row in rows}
    assert of["RoPE", 0]["128"] == pytest.approx(of[healing.WINDOWED, 0]["128"])  # which only later tokens can tell
    assert of["RoPE", 0]["256"] != of[healing.WINDOWED, 0]["256"]
    assert all(of[name, 2] != of[name, 0] for name in healing.SETTINGS)
    table = (tmp_path / "out" / "table.md").read_text()
    assert table == "\n".join(
        made.markdown() for made in (healing.table(rows), healing.differences(rows, healing.WINDOWED))
    )
    shown = capsys.readouterr()
    assert table in shown.out
    assert main([*command, "--set", "model.width=32", "--columns", "0"]) == 0  # nothing is missing
    (tmp_path / "out" / "results.json").unlink()
    assert main([*command, "--set", f"task_options.train={tmp_path},model.width=32"]) == 2
    assert "differs in model.width" in capsys.readouterr().err


def test_keys_in_noise_are_an_experiment_too(files: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    healing, keys = files
    assert main(["reproduce", str(FILE_OF_KEYS), "--scale", "smoke", "--columns", "2", "--output", str(tmp_path)]) == 0
    rows = rows_in(tmp_path / "keys.json")
    assert [row["setting"] for row in rows] == [*healing.SETTINGS, *keys.OWN]
    assert all(0.0 <= value <= 1.0 for row in rows for value in row["accuracy"].values())
    assert (tmp_path / "keys.md").read_text() == keys.table(rows).markdown()


@pytest.mark.parametrize("option", ["--jobs=2", "--shard=1/2", "--figures=svg", "--cluster=local", "--dry-run"])
def test_what_healing_has_no_use_for_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", str(FILE), "--output", str(tmp_path / "out"), option]) == 2
    name = option.strip("-").partition("=")[0].replace("-", "_")
    assert f"{name} must be left out" in capsys.readouterr().err
    assert main(["reproduce", str(FILE), "--output", str(tmp_path / "out"), "--attention", "fot"]) == 2
    assert "attention must be one of RoPE, RoPE and fixed decay" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dropped", [False, True])
def test_windows_longer_than_learned_positions_are_refused(tmp_path: Path, dropped: bool) -> None:
    (tmp_path / "train.txt").write_text("w1 w2 w3 " * 50)
    model = adopt(build_family("gpt2", n_positions=16), drop_positions=dropped)
    assert isinstance(model, transformers.GPT2LMHeadModel)
    healing = Healing(str(tmp_path), steps=1, length=17, batch=1)
    if dropped:
        heal(model, word_tokenizer(), healing)
    else:
        with pytest.raises(ValueError, match="length must be at most the 16 positions of the model, got 17"):
            heal(model, word_tokenizer(), healing)

"""Healing of adopted models; the tables of docs/adopt.md are those of the stored results."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import transformers

from tests.hub.families import build_family
from tests.hub.test_generation import word_tokenizer
from tra.hub import adopt
from tra.hub.healing import Healing, heal

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "results" / "healing"


def test_the_page_on_adopting_shows_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    healing, keys = importlib.import_module("healing"), importlib.import_module("healing_keys")
    page = (ROOT / "docs" / "adopt.md").read_text()
    rows = json.loads((STORED / "results.json").read_text())["results"]
    reported = [row for row in rows if row["setting"] in healing.SETTINGS]
    choices = [row for row in rows if row["setting"] in healing.CHOICES]
    seeds = Counter((row["setting"], row["steps"]) for row in reported)
    assert all(seeds[name, steps] == 3 for name in healing.SETTINGS for steps in (0, 50, 200))
    assert all(seeds[name, 1000] for name in healing.SETTINGS)
    assert len(choices) == len(healing.CHOICES)
    assert healing.table(reported) in page
    assert healing.differences(reported, healing.WINDOWED) in page
    assert healing.table(choices) in page
    found = json.loads((STORED / "keys.json").read_text())["results"]
    assert {row["setting"] for row in found} == healing.SETTINGS.keys() | keys.OWN.keys()
    assert keys.table(found) in page


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

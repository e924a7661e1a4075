"""`tra list`."""

from tests.cli.calling import Captured, json_of, shows
from tra.attention import MECHANISMS
from tra.experiments import BUILT_IN
from tra.recipes import RECIPES
from tra.tasks import TASKS


def test_everything_that_there_is_to_name(capsys: Captured) -> None:
    """With options and their defaults, and what implementations refuse."""
    listed = json_of(["list"], capsys)
    assert set(listed["recipes"]) >= set(RECIPES)
    assert set(listed["attention"]) >= set(MECHANISMS)
    assert set(listed["tasks"]) >= set(TASKS)
    assert set(listed["experiments"]) == set(BUILT_IN)
    assert set(listed["sizes"]) == {"mini", "medium"}
    assert all(text for entries in listed.values() for text in entries.values())
    assert "theta=500000" in listed["attention"]["rope"]
    assert all("qk_norm=True" in text for text in listed["attention"].values())
    assert listed["tasks"]["copy_unique"].endswith("Options: alphabet=100, mixed=True.")
    assert "tokenizer=gpt2" in listed["tasks"]["text"]
    assert {"reference", "cpu"} <= set(listed["implementations"])
    assert "refuse" in listed["implementations"]["cpu"]


def test_tables_for_people_show_the_same(capsys: Captured) -> None:
    shown = shows(["list"], capsys)
    for name in ("flip-flop-small", "stick-breaking", "copy_repeat", "table1", "medium", "reference"):
        assert name in shown

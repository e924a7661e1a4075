"""`tra list`."""

import pytest

from tests.cli.calling import Captured, json_of, shows
from tra.attention import MECHANISMS
from tra.experiments import BUILT_IN
from tra.recipes import RECIPES
from tra.tasks import TASKS


def test_everything_that_there_is_to_name(capsys: Captured) -> None:
    listed = json_of(["list"], capsys)
    assert set(listed["recipes"]) >= set(RECIPES)
    assert set(listed["attention"]) >= set(MECHANISMS)
    assert set(listed["tasks"]) >= set(TASKS)
    assert set(listed["experiments"]) == set(BUILT_IN)
    assert set(listed["sizes"]) == {"mini", "medium"}
    assert all(text for entries in listed.values() for text in entries.values())


def test_options_are_shown_with_their_defaults(capsys: Captured) -> None:
    listed = json_of(["list"], capsys)
    assert "theta=500000" in listed["attention"]["rope"]
    assert all("qk_norm=True" in text for text in listed["attention"].values())
    assert listed["tasks"]["copy_unique"].endswith("Options: alphabet=100, mixed=True.")
    assert "tokenizer=gpt2" in listed["tasks"]["text"]


def test_implementations_say_what_they_refuse(capsys: Captured) -> None:
    listed = json_of(["list"], capsys)["implementations"]
    assert {"reference", "cpu"} <= set(listed)
    assert "refuse" in listed["cpu"]


@pytest.mark.parametrize("name", ["flip-flop-small", "stick-breaking", "copy_repeat", "table1", "medium"])
def test_tables_for_people_show_the_same(name: str, capsys: Captured) -> None:
    assert name in shows(["list"], capsys)

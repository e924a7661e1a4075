"""What an experiment says: its rows, sweeps, checks, and the runs that follow from them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.small import content_of, flip_flop, grid_of, of_flip_flop
from tra import plugins
from tra.experiments import Experiment, Request, Row, Tuning, load_experiment, reproduce, sweep
from tra.experiments.cells import Cell, file_name
from tra.experiments.grid import chosen_rows
from tra.experiments.table1 import SMOKE

COLUMNS = {"smoke": {"flip_flop": flip_flop}}


def cells_of(experiment: Experiment, folder: Path = Path("out"), seeds: int = 1) -> list[Cell]:
    return grid_of(experiment, folder, seeds=seeds).cells()


def test_a_row_is_called_by_its_mechanism_options_and_changes() -> None:
    assert Row("rope").label == "rope"
    assert Row("rope", {"theta": 10_000}).label == "rope theta=10000"
    assert Row("rope", {"theta": 1e6, "qk_norm": False}).label == "rope theta=1e+06 qk_norm=False"
    assert Row("tra", changes={"learning_rate": 3e-5, "model.layers": 2}).label == (
        "tra learning_rate=3e-05 model.layers=2"
    )
    assert Row("rope", {"theta": 10_000}, name="RoPE, short").label == "RoPE, short"


def test_values_that_differ_never_have_one_label() -> None:
    first, second = (Row("tra", changes={"learning_rate": rate}).label for rate in (0.0012345678, 0.0012345679))
    assert first != second


def test_a_row_gives_the_recipe_its_options_changes_and_seed() -> None:
    row = Row("rope", {"theta": 123.0}, {"model.width": 24, "warmup": 0.5, "task_options": {"ignore": 0.5}})
    recipe, usual = row.recipe(flip_flop, 7), flip_flop("rope")
    assert recipe.differences(usual) == {
        "model.attention_options": ({"theta": 123.0}, {}),
        "model.width": (24, 16),
        "warmup": (0.5, usual.warmup),
        "task_options": ({"ignore": 0.5}, usual.task_options),
        "seed": (7, 0),
    }


def test_options_of_a_row_are_added_to_those_of_the_column() -> None:
    def without_norm(attention: str = "tra") -> Any:
        recipe = flip_flop(attention)
        return replace(recipe, model=replace(recipe.model, attention_options={"qk_norm": False}))

    recipe = Row("rope", {"theta": 9.0}).recipe(without_norm, 0)
    assert recipe.model.attention_options == {"theta": 9.0, "qk_norm": False}


def test_one_mechanism_with_different_options_is_rows_with_folders_of_their_own() -> None:
    experiment = Experiment(COLUMNS, ("rope", Row("rope", {"theta": 10_000}), Row("rope", {"theta": 1e6})))
    cells = cells_of(experiment, Path("out"))
    assert [cell.row for cell in cells] == ["rope", "rope theta=10000", "rope theta=1e+06"]
    assert [str(cell.folder) for cell in cells] == [
        "out/runs/flip_flop/rope/0",
        "out/runs/flip_flop/rope-theta=10000/0",
        "out/runs/flip_flop/rope-theta=1e+06/0",
    ]
    assert [cell.recipe.model.attention_options.get("theta") for cell in cells] == [None, 10_000, 1e6]


@pytest.mark.usefixtures("run_here")
def test_they_are_two_rows_of_every_table(tmp_path: Path) -> None:
    rows = (Row("rope", {"theta": 100}), Row("rope", {"theta": 1e6}, name="RoPE, far"))
    outcome = of_flip_flop(rows=rows).perform(Request(tmp_path, "smoke"))
    for line in ("| rope theta=100 |", "| RoPE, far |"):
        assert outcome.shown.count(f"\n{line}") == 4  # the last of token accuracy, because no sequence is right
    assert {row["attention"] for row in content_of(tmp_path)["results"]} == {"rope theta=100", "RoPE, far"}
    losses = {record.row: record.result.loss for record in outcome.records if record.result.length == 16}
    assert losses["rope theta=100"] != losses["RoPE, far"]
    assert (tmp_path / "runs" / "flip_flop" / "RoPE,-far" / "0" / "results.json").exists()


def test_a_sweep_has_every_row_with_every_combination() -> None:
    rows = sweep(["tra", Row("rope", {"theta": 9})], {"model.layers": (1, 2), "weight_decay": (0.0, 0.1)})
    assert [row.label for row in rows] == [
        f"{name} model.layers={layers} weight_decay={decay}"
        for name in ("tra", "rope theta=9")
        for layers in (1, 2)
        for decay in ("0", "0.1")
    ]
    recipes = [row.recipe(flip_flop, 0) for row in rows]
    assert [(recipe.model.layers, recipe.weight_decay) for recipe in recipes] == [
        (1, 0),
        (1, 0.1),
        (2, 0),
        (2, 0.1),
    ] * 2
    assert [row.options for row in rows[4:]] == [{"theta": 9}] * 4
    again = sweep(rows[:1], {"clip": (2.0,)})
    assert again[0].label == "tra model.layers=1 weight_decay=0 clip=2"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.witdh": 8}, "got 'model.witdh'; did you mean 'model.width'"),
        ({"learning_rat": 8}, "got 'learning_rat'; did you mean 'learning_rate'"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
    ],
)
def test_what_a_recipe_cannot_have_is_said_before_anything_is_written(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    experiment = of_flip_flop(rows=(Row("tra", changes=changes),))
    for ask in (experiment.perform, experiment.plan):
        with pytest.raises(ValueError, match=message):
            ask(Request(tmp_path / "out", "smoke"))
    wrong = of_flip_flop(rows=(Row("rope", {"thet": 1}),))
    with pytest.raises(ValueError, match="did you mean 'theta'"):
        wrong.perform(Request(tmp_path / "out", "smoke"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": ()}, "must have at least one row"),
        ({"scales": {}}, "one scale"),
        ({"scales": {"smoke": {}}}, "one column in each"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"rows": ("tra", "rope", "tra")}, "rows must have different names, got 'tra' twice"),
        ({"rows": ("tra", Row("rope", name="tra"))}, "rows must have different names, got 'tra' twice"),
        (
            {"rows": (Row("tra", name="my row"), Row("rope", name="my/row"))},
            "got 'my row' and 'my/row', whose folders would be the same",
        ),
        ({"scales": {"smoke": {"a b": flip_flop, "a/b": flip_flop}}}, "columns must have different names"),
        ({"tuning": Tuning({"warmup": (0.1,)}, rows=("ropp",))}, "got 'ropp'; did you mean 'rope'?"),
        (
            {"rows": sweep(["tra"], {"warmup": (0.1, 0.2)}), "tuning": Tuning({"warmup": (0.1,)})},
            "row 'tra warmup=0.1' must not set what is tuned, got warmup",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_experiment_that_could_not_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        of_flip_flop(**changes)


def test_the_seed_is_nobody_elses_to_change() -> None:
    with pytest.raises(ValueError, match="changes must leave the seed alone"):
        Row("tra", changes={"seed": 3})
    with pytest.raises(ValueError, match="changes must leave the seed alone"):
        sweep(["tra"], {"seed": (1, 2)})
    with pytest.raises(ValueError, match="grid must leave the seed alone"):
        Tuning({"seed": (1, 2)})


def test_no_name_leads_out_of_the_folder() -> None:
    assert [file_name(label) for label in ("..", "../up", ".hidden", "a b", "ä/ö", "1e-05")] == [
        "--",
        "---up",
        "-hidden",
        "a-b",
        "ä-ö",
        "1e-05",
    ]


MANY = of_flip_flop(rows=("tra", "rope", Row("rope", {"theta": 9}), Row("rope", {"theta": 8}, name="mine")))


def test_rows_are_chosen_by_label_and_by_mechanism() -> None:
    def chosen(*names: str) -> list[str]:
        return [row.label for row in chosen_rows(MANY.rows, names)]

    assert chosen() == ["tra", "rope", "rope theta=9", "mine"]
    assert chosen("mine", "tra") == ["mine", "tra"]
    assert chosen("rope theta=9", "rope theta=9") == ["rope theta=9"]
    assert chosen("rope") == ["rope"], "the row of that name, not all of that mechanism"
    without = replace(MANY, rows=MANY.rows[2:])
    assert [row.label for row in chosen_rows(without.rows, ["rope"])] == ["rope theta=9", "mine"]


def test_a_mechanism_that_is_no_row_becomes_one() -> None:
    grid = grid_of(MANY, attention=["alibi", "tra"])
    assert grid.rows == [Row("alibi"), Row("tra")]
    assert not any(cell.tuned for cell in grid.cells())


def test_an_unknown_row_is_met_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="got 'rop'; did you mean 'rope'"):
        chosen_rows(MANY.rows, ["rop"])
    with pytest.raises(ValueError, match="got 'rope teta=9'; did you mean 'rope theta=9'"):
        chosen_rows(MANY.rows, ["rope teta=9"])


def test_a_mechanism_of_a_plugin_is_chosen_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "more_of_them.py"
    file.write_text("from tra.attention import MECHANISMS as KNOWN\nMECHANISMS = {'other': KNOWN['rope']}\n")
    plugins.load(str(file))
    assert chosen_rows(MANY.rows, ["other"]) == [Row("other")]


def test_the_small_scale_is_usual_where_there_is_one() -> None:
    assert of_flip_flop().usual_scale == "smoke"
    assert replace(of_flip_flop(), scales={"paper": SMOKE, "small": SMOKE}).usual_scale == "small"


def test_experiments_are_found_by_name_and_loaded_when_wanted() -> None:
    assert load_experiment("demo").usual_scale == "small"
    with pytest.raises(ValueError, match="got 'table2'; did you mean 'table1'"):
        load_experiment("table2")


@pytest.mark.usefixtures("run_here")
def test_from_python_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = reproduce(of_flip_flop(), tmp_path, attention=["tra"], figures=["svg"])
    assert capsys.readouterr() == ("", "")
    assert [cell.row for cell in outcome.cells] == ["tra"]
    assert {record.result.length for record in outcome.records} == {8, 16}
    assert outcome.folder == tmp_path
    assert (tmp_path / "accuracy-flip_flop.svg").exists()
    assert json.loads(json.dumps(outcome.content)) == content_of(tmp_path)
    assert outcome.shown == (tmp_path / "table.md").read_text()


def test_at_a_scale_it_may_have_other_seeds_and_another_tuning(tmp_path: Path) -> None:
    tuned = Tuning({"learning_rate": (1e-3, 2e-3)})
    experiment = of_flip_flop(seeds=2, tuning=tuned, at_scale={"smoke": {"seeds": 1, "tuning": None}})
    assert (grid_of(experiment).seeds, grid_of(experiment).tuning) == (1, None)
    other = replace(experiment, scales={"small": experiment.scales["smoke"]})
    assert (grid_of(other, scale="small").seeds, grid_of(other, scale="small").tuning) == (2, tuned)
    assert [row[2] for row in experiment.plan(Request(tmp_path, "smoke", attention=("tra",))).rows] == ["1", "1"]

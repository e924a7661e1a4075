"""Settings chosen for each row before anything is reported."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.conftest import REPRODUCE
from tests.experiments.small import content_of, files_below, flip_flop, grid_of, of_flip_flop, sets
from tra.errors import RunError
from tra.experiments import Experiment, Outcome, Request, Row, Tuning
from tra.experiments.cells import Cell, Place
from tra.experiments.local_jobs import run_cell
from tra.experiments.search import Search
from tra.experiments.tuning import (
    Evidence,
    Losses,
    Round,
    Tried,
    choose,
    edges_of,
    tuning_losses,
    tuning_table,
    tuning_tables,
)
from tra.recipes import Evaluation, Recipe
from tra.runs import load_run
from tra.tasks import ExactMatch, Result

RATES = Tuning({"learning_rate": (1e-3, 2e-2)})


def with_two_sets(attention: str = "tra") -> Recipe:
    return replace(flip_flop(attention), evaluations=sets("iid", "dense"))


TWO = Experiment({"smoke": {"a": flip_flop, "b": with_two_sets}}, ("tra", "rope"), tuning=RATES)


def measured(experiment: Experiment, losses: Mapping[tuple[Any, ...], tuple[float, float]]) -> dict[Cell, list[Result]]:
    """For each column, row, learning rate and seed: the loss at 8, the training length, and at 16."""
    found: dict[Cell, list[Result]] = {}
    for cell in grid_of(experiment).tuning_cells():
        key = (cell.column, cell.row, cell.recipe.learning_rate, cell.recipe.seed)
        found[cell] = [
            ExactMatch("iid", length, 4, None, loss, None, 0.0, 0.0)
            for length, loss in zip((8, 16), losses[key], strict=True)
        ]
    return found


def chosen(experiment: Experiment, found: Mapping[Cell, list[Result]]) -> dict[tuple[str, str], Any]:
    """The settings of every column and row, after one round of a search."""
    grid = grid_of(experiment)
    search = Search(grid)
    search.next()
    search.tell(tuning_losses(found)[0])
    evidence = search.evidence()
    return {place: evidence[grid.tuned_on(place)].chosen for place in grid.places}


def test_the_lowest_loss_within_the_training_length_is_chosen_whatever_lies_past_it() -> None:
    """The higher rate is far better past it; the lower is better within it by the mean over seeds."""
    experiment = of_flip_flop(rows=("tra",), tuning=replace(RATES, seeds=(100, 101)))
    found = measured(
        experiment,
        {
            ("flip_flop", "tra", 1e-3, 100): (1.0, 9.0),
            ("flip_flop", "tra", 1e-3, 101): (0.2, 9.0),
            ("flip_flop", "tra", 2e-2, 100): (0.7, 0.1),
            ("flip_flop", "tra", 2e-2, 101): (0.6, 0.1),
        },
    )
    losses = {one.label: one.loss for one in tuning_losses(found)[0][Place("flip_flop", "tra")]}
    assert losses == pytest.approx({"learning_rate=0.001": 0.6, "learning_rate=0.02": 0.65})
    assert chosen(experiment, found) == {("flip_flop", "tra"): {"learning_rate": 1e-3}}


AT = {
    ("a", "tra", 1e-3, 1000): (1.0, 0.0),
    ("a", "tra", 2e-2, 1000): (2.0, 0.0),
    ("a", "rope", 1e-3, 1000): (2.0, 0.0),
    ("a", "rope", 2e-2, 1000): (1.0, 0.0),
    ("b", "tra", 1e-3, 1000): (3.0, 0.0),
    ("b", "tra", 2e-2, 1000): (2.0, 0.0),
    ("b", "rope", 1e-3, 1000): (2.0, 0.0),
    ("b", "rope", 2e-2, 1000): (1.0, 0.0),
}


def test_each_column_and_row_has_a_choice_of_its_own() -> None:
    found = measured(TWO, AT)
    assert chosen(TWO, found) == {
        ("a", "tra"): {"learning_rate": 1e-3},
        ("a", "rope"): {"learning_rate": 2e-2},
        ("b", "tra"): {"learning_rate": 2e-2},
        ("b", "rope"): {"learning_rate": 2e-2},
    }


def test_or_one_column_chooses_for_all() -> None:
    one = replace(TWO, tuning=replace(RATES, column="a"))
    found = measured(one, AT)
    assert {cell.column for cell in found} == {"a"}
    assert chosen(one, found) == {
        (column, row): {"learning_rate": rate} for row, rate in (("tra", 1e-3), ("rope", 2e-2)) for column in "ab"
    }
    with pytest.raises(ValueError, match="column must be one of a, b, got 'c'"):
        replace(TWO, tuning=replace(RATES, column="c")).perform(Request(Path("out"), "smoke"))


def test_every_combination_is_tried_in_a_folder_of_its_own() -> None:
    grid = {"learning_rate": (1e-3, 0.0010000001), "model.layers": (1, 2), "weight_decay": (0.0,)}
    experiment = replace(TWO, tuning=Tuning(grid, seeds=(7, 9)))
    cells = grid_of(replace(experiment, rows=[Row("rope", {"theta": 9})])).tuning_cells()
    assert len(cells) == len({cell.folder for cell in cells}) == len({cell.label for cell in cells}) == 2 * 2 * 4
    first = cells[0]
    assert first.folder == Path("out/tuning/a/rope-theta=9/learning_rate=0.001-model.layers=1-weight_decay=0/7")
    for cell in cells:
        assert {name: getattr(cell.recipe, name) for name in ("learning_rate", "weight_decay")} == {
            name: cell.choice[name] for name in ("learning_rate", "weight_decay")
        }
        assert cell.recipe.model.layers == cell.choice["model.layers"]
        assert cell.recipe.model.attention_options == {"theta": 9}
    assert {cell.recipe.seed for cell in cells} == {7, 9}


@pytest.mark.parametrize("seeds, tried", [(2, (1,)), (1001, (1000,)), (1, (5, 0))])
def test_seeds_that_are_reported_are_not_tuned_on(seeds: int, tried: tuple[int, ...], tmp_path: Path) -> None:
    experiment = of_flip_flop(tuning=replace(RATES, seeds=tried))
    for ask in (experiment.perform, experiment.plan):
        with pytest.raises(ValueError, match=f"seeds of tuning must not be among the {seeds} that are reported"):
            ask(Request(tmp_path / "out", "smoke", seeds=seeds))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "grid, seeds, message",
    [
        ({}, (1,), "grid must name fields of a recipe and values for each"),
        ({"learning_rate": ()}, (1,), "grid must name fields of a recipe and values for each"),
        ({"learning_rate": (1,)}, (), "seeds must name at least one seed"),
    ],
)
def test_tuning_that_could_choose_nothing_is_refused(grid: Any, seeds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tuning(grid, seeds=seeds)


@pytest.mark.parametrize("options", [{"tolerance": -1e-3, "extended": "learning_rate"}, {"tolerance": 1e-3}])
def test_a_tolerance_must_say_what_it_prefers(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tolerance must be at least 0, and 0 without extended, got -?0\.001"):
        Tuning({"learning_rate": (1e-3, 2e-3)}, **options)


def test_a_column_that_is_only_measured_past_its_training_length_cannot_be_tuned() -> None:
    found: dict[Cell, list[Result]] = {
        cell: [ExactMatch("iid", 16, 4, None, 1.0, None, 0.0, 0.0)] for cell in measured(TWO, AT)
    }
    with pytest.raises(ValueError, match="a must be measured within the training length of 8"):
        tuning_losses(found)


@pytest.mark.parametrize("lengths", [(16, 32), ()])
def test_what_tuning_could_not_measure_is_refused_before_anything_is_trained(
    lengths: tuple[int, ...], tmp_path: Path
) -> None:
    recipe = replace(flip_flop(), evaluations=tuple(Evaluation("iid", length, 4) for length in lengths))
    experiment = of_flip_flop(scales={"smoke": {"flip_flop": lambda attention: recipe}}, tuning=RATES)
    got = "iid at 16, iid at 32" if lengths else "nothing"
    message = f"flip_flop must be measured within the training length of 8, .* got {got};"
    for ask in (experiment.perform, experiment.plan):
        with pytest.raises(ValueError, match=message):
            ask(Request(tmp_path / "out", "smoke"))
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_a_number_is_never_the_best() -> None:
    tried = [Tried({"clip": float(place)}, [loss]) for place, loss in enumerate((math.nan, 3.0, math.inf))]
    assert choose(RATES, tried) == ({"clip": 1.0}, None)
    assert choose(RATES, tried[::2]) == (None, None)


@pytest.mark.parametrize("tolerance, rate, norm", [(0.0, 4e-3, True), (1e-3, 2e-3, False), (0.1, 1e-3, True)])
def test_of_losses_that_differ_by_nothing_the_lowest_rate_is_taken(tolerance: float, rate: float, norm: bool) -> None:
    """Of those with the same rate the lowest loss; one that is not a number is never near enough."""
    tuning = Tuning(
        {"learning_rate": (1e-3, 2e-3), "qk_norm": (True, False)}, extended="learning_rate", tolerance=tolerance
    )
    losses = {(1e-3, True): 0.05, (1e-3, False): math.nan, (2e-3, True): 3e-4, (2e-3, False): 2e-4, (4e-3, True): 1e-5}
    tried = [Tried({"learning_rate": key[0], "qk_norm": key[1]}, [loss]) for key, loss in losses.items()]
    assert choose(tuning, tried) == ({"learning_rate": rate, "qk_norm": norm}, None)
    (table,) = tuning_tables(tuning, {Place("a", "tra"): Evidence("a", [1000], [Round(1.0, tried)], None)})
    assert table.note.endswith(f"losses at most {tolerance:g} above it.") == (tolerance > 0)


@pytest.mark.parametrize(
    "first, other, both",
    [
        ([0.10, 0.10], [0.30, 0.30], False),
        ([0.10, 0.14], [0.15, 0.17], True),  # 0.04 apart, as one's seeds are
        ([0.10, 0.13], [0.15, 0.17], False),
        ([0.10, 0.10], [0.11, 0.40], True),  # the worse one's seeds differ most
        ([0.10, 0.10], [0.10, math.inf], False),  # one that diverges is told apart
        ([0.10], [0.10], False),  # of one seed nothing is known
    ],
)
def test_a_second_choice_is_one_that_differs_by_less_than_seeds_do(
    first: list[float], other: list[float], both: bool
) -> None:
    taken, second = choose(RATES, [Tried({"clip": 2.0}, other), Tried({"clip": 1.0}, first)])
    assert taken == ({"clip": 1.0} if len(first) > 1 else {"clip": 2.0})
    assert second == ({"clip": 2.0} if both else None)


def test_the_table_of_tuning_has_the_lowest_loss_of_each_row_bold() -> None:
    table = tuning_table(tuning_losses(measured(TWO, AT))[0]).markdown()
    assert table.splitlines()[4:] == [
        "| attention | learning_rate=0.001 | learning_rate=0.02 |",
        "|---|---:|---:|",
        "| a tra | **1.0000** | 2.0000 |",
        "| a rope | 2.0000 | **1.0000** |",
        "| b tra | 3.0000 | **2.0000** |",
        "| b rope | 2.0000 | **1.0000** |",
    ]


ONE_TUNED = of_flip_flop(tuning=replace(RATES, rows=("tra",)), seeds=2)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """TRA tuned and RoPE not, run once for all tests, which leave the folder as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REPRODUCE, "run_all", lambda cells, jobs: [run_cell(cell) for cell in cells])
        return ONE_TUNED.perform(Request(tmp_path_factory.mktemp("tuned"), "smoke"))


def test_the_evidence_is_stored_with_the_losses_of_the_runs_that_were_tried(tuned: Outcome) -> None:
    content = content_of(tuned.folder)
    assert content["sessions"][0]["trained"] == 2 + 4
    (name, evidence), *others = content["tuning"].items()
    assert (name, others) == ("flip_flop tra", [])
    assert (evidence["column"], evidence["seeds"]) == ("flip_flop", [1000])
    ((share, entries),) = (round.values() for round in evidence["rounds"])
    assert share == 1.0
    losses = {f"learning_rate={one['settings']['learning_rate']:g}": one["losses"] for one in entries}
    for rate in ("0.001", "0.02"):
        tried = tuned.folder / "tuning" / "flip_flop" / "tra" / f"learning_rate={rate}" / "1000"
        (within,) = (row["loss"] for row in content_of(tried)["results"] if row["length"] == 8)
        assert losses[f"learning_rate={rate}"] == [within]
    assert f"learning_rate={evidence['chosen']['learning_rate']:g}" == min(losses, key=losses.__getitem__)


def test_tuned_settings_are_those_of_the_reported_runs_and_other_rows_keep_theirs(tuned: Outcome) -> None:
    content = content_of(tuned.folder)
    rate = content["tuning"]["flip_flop tra"]["chosen"]["learning_rate"]
    for seed in range(2):
        runs = tuned.folder / "runs" / "flip_flop"
        assert load_run(runs / "tra" / str(seed)).recipe.learning_rate == rate
        assert load_run(runs / "rope" / str(seed)).recipe == replace(flip_flop("rope"), seed=seed)
    assert {row["attention"]: row["learning_rate"] for row in content["results"]}["tra"] == rate
    assert {row["seed"] for row in content["results"]} == {0, 1}, "not that of tuning"


def test_tables_mark_what_was_not_tuned_and_end_with_the_losses(tuned: Outcome) -> None:
    assert {(record.row, record.tuned) for record in tuned.records} == {("tra", True), ("rope", False)}
    assert "| rope† |" in tuned.shown
    assert "| tra |" in tuned.shown
    assert " †: not tuned. " in tuned.shown
    (part,) = Evidence.from_dict(content_of(tuned.folder)["tuning"]["flip_flop tra"]).rounds
    table = tuning_table({Place("flip_flop", "tra"): list(part.tried)}).markdown()
    assert tuned.shown.splitlines()[-1] == table.splitlines()[-1]


@pytest.mark.parametrize("train", [True, False])
def test_what_was_tuned_is_not_tuned_again(train: bool, tuned: Outcome, tmp_path: Path, run_here: Any) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(tuned.folder, folder)
    before = files_below(folder / "tuning") | files_below(folder / "runs")
    again = ONE_TUNED.perform(Request(folder, "smoke", train=train))
    assert run_here == []
    assert again.shown == tuned.shown
    assert json.loads(json.dumps(again.content)) == content_of(tuned.folder)
    assert files_below(folder / "tuning") | files_below(folder / "runs") == before


def test_a_row_whose_tuning_fails_is_not_reported_and_stops_no_other(
    tmp_path: Path, run_here: list[list[Cell]]
) -> None:
    stranger = tmp_path / "tuning" / "flip_flop" / "tra" / "learning_rate=0.02" / "1000"
    stranger.mkdir(parents=True)
    (stranger / "recipe.json").write_text(flip_flop().to_json())
    alone = of_flip_flop(rows=("tra",), tuning=RATES)
    with pytest.raises(RunError, match=f"no run in {tmp_path} is finished: folder {stranger} holds a run"):
        alone.perform(Request(tmp_path, "smoke"))
    assert not (tmp_path / "runs").exists()
    both = of_flip_flop(rows=("tra", "rope"), tuning=RATES)
    outcome = both.perform(Request(tmp_path, "smoke"))
    assert {cell.row for cell in outcome.cells} == {"rope"}
    assert list(outcome.failures) == ["flip_flop tra learning_rate=0.02 seed 1000 (tuning)"]
    (stranger / "recipe.json").unlink()
    outcome = both.perform(Request(tmp_path, "smoke"))
    assert {cell.row for cell in outcome.cells} == {"tra", "rope"}
    assert outcome.failures == {}
    assert len(run_here[-2]) == 1, "what was tried before is not tried again"


def test_a_row_of_which_every_choice_diverges_is_a_failure(tmp_path: Path, run_here: list[list[Cell]]) -> None:
    experiment = of_flip_flop(rows=("tra",), tuning=Tuning({"learning_rate": (1e29, 1e30)}))
    with pytest.raises(RunError, match="is finished: every choice diverged"):
        experiment.perform(Request(tmp_path, "smoke"))


def test_where_tuning_never_ran_what_is_stored_counts_as_not_tuned(tmp_path: Path, run_here: list[list[Cell]]) -> None:
    of_flip_flop(rows=("tra",)).perform(Request(tmp_path, "smoke"))
    outcome = of_flip_flop(rows=("tra",), tuning=RATES).perform(Request(tmp_path, "smoke", train=False))
    assert len(run_here) == 1
    assert {record.tuned for record in outcome.records} == {False}
    assert content_of(tmp_path)["tuning"] == {}


def test_a_choice_that_diverges_loses_and_stops_nothing(tmp_path: Path) -> None:
    experiment = of_flip_flop(rows=("tra",), tuning=Tuning({"learning_rate": (1e-3, 1e30)}))
    outcome = experiment.perform(Request(tmp_path, "smoke"))
    assert {cell.recipe.learning_rate for cell in outcome.cells} == {1e-3}
    (evidence,) = content_of(tmp_path)["tuning"].values()
    assert {"settings": {"learning_rate": 1e30}, "losses": [math.inf]} in evidence["rounds"][0]["tried"]
    tries = {path.parent.parent.name: load_run(path.parent) for path in tmp_path.glob("tuning/*/*/*/*/recipe.json")}
    assert tries["learning_rate=1e+30"].diverged
    assert not tries["learning_rate=0.001"].diverged


HALVING = Tuning(
    {"learning_rate": (1e-3, 2e-3, 4e-3), "model.attention_options.qk_norm": (True, False)},
    rounds=((0.25, None), (0.5, 2), (1.0, 1)),
    extended="learning_rate",
)


def searched(loss_of: Any, tuning: Tuning = HALVING) -> tuple[Search, list[list[Cell]]]:
    """A search in which every run of a row has the loss that a function of its choice gives, and what it tried."""
    experiment = of_flip_flop(rows=("tra", "rope"), tuning=tuning)
    search, asked = Search(grid_of(experiment)), []
    while cells := search.next():
        asked.append(cells)
        losses: Losses = {}
        for cell in cells:
            found = loss_of(cell.row, cell.recipe.learning_rate, cell.choice["model.attention_options.qk_norm"])
            losses.setdefault(cell.place, []).append(Tried(cell.choice, [found]))
        search.tell(losses)
    return search, asked


def test_each_round_keeps_the_best_of_the_last_and_the_last_decides() -> None:
    """The best of TRA is amid the grid; RoPE's is at its lower end, so that one rate below is tried, and is worse."""
    best = {"tra": (2e-3, False), "rope": (1e-3, True)}

    def loss(row: str, rate: float, norm: bool) -> float:
        return abs(math.log2(rate / best[row][0])) + 0.1 * (norm != best[row][1])

    search, asked = searched(loss)
    assert [len(cells) for cells in asked] == [12, 1, 4, 2]
    assert [cell.recipe.steps for cells in asked for cell in cells[:1]] == [1, 1, 2, 4]
    (beyond,) = asked[1]
    assert (beyond.row, beyond.choice_label) == ("rope", "learning_rate=0.0005 qk_norm=True")
    assert beyond.recipe.model.attention_options == {"qk_norm": True}
    assert {(cell.row, cell.choice_label) for cell in asked[2]} == {
        (row, f"learning_rate={rate} qk_norm={norm}")
        for row, rate in (("tra", "0.002"), ("rope", "0.001"))
        for norm in (True, False)
    }
    evidence = search.evidence()
    assert {place: found.chosen for place, found in evidence.items()} == {
        ("flip_flop", row): {"learning_rate": rate, "model.attention_options.qk_norm": norm}
        for row, (rate, norm) in best.items()
    }
    assert len({cell.folder for cells in asked for cell in cells}) == 19
    rounds = evidence[Place("flip_flop", "rope")].rounds
    assert [(len(one.tried), one.share_of_steps) for one in rounds] == [(7, 0.25), (2, 0.5), (1, 1.0)]


def test_the_grid_goes_on_past_its_ends_but_not_for_ever() -> None:
    _, asked = searched(lambda row, rate, norm: -rate if row == "tra" else rate)
    rates = [[cell.recipe.learning_rate for cell in cells] for cells in asked[1:4]]
    assert rates == [[8e-3, 5e-4], [16e-3, 2.5e-4], [32e-3, 1.25e-4]]
    assert {cell.recipe.learning_rate for cell in asked[-1]} == {32e-3, 1.25e-4}
    assert all(cells[0].choice["model.attention_options.qk_norm"] for cells in asked[1:4]), "with what the best has"


def test_a_run_past_the_end_of_the_grid_that_comes_to_nothing_is_given_once() -> None:
    """The process died, say, or nothing is trained: the row goes on with what the grid itself gave."""
    experiment = of_flip_flop(rows=("tra",), tuning=HALVING)
    search = Search(grid_of(experiment))
    place = Place("flip_flop", "tra")
    search.tell({place: [Tried(cell.choice, [cell.recipe.learning_rate]) for cell in search.next()]})
    (beyond,) = search.next()
    assert beyond.choice["learning_rate"] == 5e-4
    search.tell({})
    assert {cell.choice["learning_rate"] for cell in search.next()} == {1e-3}


def test_a_choice_that_diverges_is_not_kept_and_a_row_without_any_is_left_out() -> None:
    def loss(row: str, rate: float, norm: bool) -> float:
        return math.inf if row == "rope" or rate > 3e-3 else rate

    _, asked = searched(loss, replace(HALVING, extended=None))
    assert [{cell.row for cell in cells} for cells in asked] == [{"tra", "rope"}, {"tra"}, {"tra"}]
    assert all(cell.recipe.learning_rate < 3e-3 for cells in asked[1:] for cell in cells)


def test_tuning_is_measured_within_the_training_length_on_the_set_that_is_like_what_is_trained_on() -> None:
    for cell in grid_of(TWO, attention=["tra"]).tuning_cells():
        assert [(entry.name, entry.length) for entry in cell.recipe.evaluations] == [("iid", 8)]


def test_what_tuning_trained_is_not_kept(tmp_path: Path, run_here: list[list[Cell]]) -> None:
    experiment = of_flip_flop(rows=("tra",), tuning=replace(RATES, rounds=((0.5, None), (1.0, 1))))
    experiment.perform(Request(tmp_path, "smoke"))
    assert [len(cells) for cells in run_here] == [2, 1, 1]
    assert not list(tmp_path.glob("tuning/**/checkpoints"))
    assert list(tmp_path.glob("runs/**/checkpoints"))
    experiment.perform(Request(tmp_path, "smoke"))
    assert len(run_here) == 3, "nothing is trained again"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rounds": ()}, "rounds must each have a share of the steps and a number of choices"),
        ({"rounds": ((0.0, None),)}, "rounds must each have a share of the steps and a number of choices"),
        ({"rounds": ((0.5, 0),)}, "rounds must each have a share of the steps and a number of choices"),
        ({"extended": "warmup"}, "extended must be one of learning_rate"),
        ({"grid": {"learning_rate": (2e-3, 1e-3)}}, "learning_rate must have two or more rising values to be extended"),
        ({"grid": {"learning_rate": (1e-3,)}}, "learning_rate must have two or more rising values to be extended"),
    ],
)
def test_rounds_and_extensions_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(HALVING, **changes)


def test_a_choice_at_the_edge_of_what_was_tried_is_told_from_one_within() -> None:
    tried = [
        Tried({"learning_rate": rate, "model.attention_options.qk_norm": norm}, [1.0])
        for rate in (1e-3, 2e-3, 4e-3)
        for norm in (True, False)
    ]
    for rate, edges in ((1e-3, ["learning_rate"]), (2e-3, []), (4e-3, ["learning_rate"])):
        chosen = {"learning_rate": rate, "model.attention_options.qk_norm": True}
        evidence = Evidence("copy", [1000], [Round(1.0, tried)], chosen)
        assert edges_of(evidence) == edges
        (table,) = tuning_tables(RATES, {Place("copy", "tra"): evidence})
        warning = "edge of what was tried, so that a better value may lie beyond: copy tra (learning_rate)"
        assert (warning in table.note) == bool(edges)
    assert edges_of(Evidence("copy", [1000], [Round(1.0, tried[:1])], tried[0].settings)) == []


TWO_SEEDS = Tuning({"learning_rate": (1e-3, 2e-2)}, seeds=(1000, 1001), rounds=((0.5, None), (1.0, 2)))
BOTH = of_flip_flop(rows=("tra",), tuning=TWO_SEEDS, seeds=2)


LOSSES = {(1e-3, 1000): 2.0, (2e-2, 1000): 1.1, (1e-3, 1001): 1.0, (2e-2, 1001): 2.0}
"""By rate and seed: the first seed is for one rate, both together are for the other, by less than they differ."""


def make_up_losses(monkeypatch: pytest.MonkeyPatch, loss_of: Callable[[Recipe], float]) -> None:
    """Tuning sees the losses that a function of the recipe gives."""

    def losses(measured: Mapping[Cell, list[Result]], *others: Any, **ended: bool) -> tuple[Losses, dict[str, str]]:
        made_up = {
            cell: [replace(result, loss=loss_of(cell.recipe)) for result in results]
            for cell, results in measured.items()
        }
        return tuning_losses(made_up, *others, **ended)

    monkeypatch.setattr("tra.experiments.perform.tuning_losses", losses)


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_losses(monkeypatch, lambda recipe: LOSSES[recipe.learning_rate, recipe.seed])


def rates(content: Mapping[str, Any]) -> dict[str, float]:
    return {record["attention"]: record["learning_rate"] for record in content["results"]}


def test_two_settings_that_tuning_cannot_tell_apart_are_both_reported(
    tmp_path: Path, run_here: list[list[Cell]], undecided: None
) -> None:
    outcome = BOTH.perform(Request(tmp_path, "smoke"))
    assert [len(cells) for cells in run_here] == [2, 4, 4], "the last round has both seeds, the report both choices"
    assert rates(outcome.content) == {"tra": 1e-3, "tra (second choice)": 2e-2}
    assert outcome.content["tuning"]["flip_flop tra"]["second"] == {"learning_rate": 2e-2}
    assert "tra (second choice)" in outcome.shown
    assert "differ by less than seeds do, and both are reported: flip_flop tra." in outcome.shown
    assert "second, as good as tuning can tell: learning_rate = 0.02" in (tmp_path / "report.html").read_text()
    BOTH.perform(Request(tmp_path, "smoke"))
    assert len(run_here) == 3, "nothing is trained again"
    joined = BOTH.perform(Request(tmp_path / "other", "smoke", train=False, join=[tmp_path / "results.json"]))
    assert joined.content["results"] == outcome.content["results"]


def test_what_was_tuned_on_one_seed_is_completed_with_the_other(
    tmp_path: Path, run_here: list[list[Cell]], undecided: None
) -> None:
    """Results that are stored already are not trained again: they stand in the row that their settings belong to."""
    one = replace(BOTH, tuning=replace(TWO_SEEDS, seeds=(1000,)))
    stored = one.perform(Request(tmp_path / "one", "smoke"))
    assert rates(stored.content) == {"tra": 2e-2}, "the coin's other side"
    read = BOTH.perform(Request(tmp_path / "one", "smoke", train=False))
    assert read.content["tuning"]["flip_flop tra"]["seeds"] == [1000], "it says what there is"
    run_here.clear()
    found = BOTH.perform(Request(tmp_path / "both", "smoke", join=[tmp_path / "one" / "results.json"]))
    assert [[cell.recipe.seed for cell in cells] for cells in run_here] == [[1001, 1001], [0, 1]]
    assert rates(found.content) == {"tra": 1e-3, "tra (second choice)": 2e-2}
    kept = [record for record in found.content["results"] if record["attention"] == "tra (second choice)"]
    assert [{**record, "attention": "tra"} for record in kept] == stored.content["results"]
    files = [tmp_path / name / "results.json" for name in ("one", "both")]
    for order in (files, files[::-1]):  # in the older file the first row has what is the second choice now
        again = BOTH.perform(Request(tmp_path / "again", "smoke", train=False, join=order))
        assert again.content["results"] == found.content["results"]


def test_evidence_of_earlier_versions_is_read() -> None:
    """Which stored a loss by each label."""
    losses = {"learning_rate=0.001 qk_norm=True": 0.5, "learning_rate=0.002 qk_norm=False": 0.25}
    stored = {
        "column": "copy",
        "seeds": [1000],
        "rounds": [{"share_of_steps": 0.2, "losses": losses}],
        "chosen": {"learning_rate": 2e-3, "model.attention_options.qk_norm": False},
    }
    found = Evidence.from_dict(stored)
    assert [(one.settings, one.losses) for one in found.rounds[0].tried] == [
        ({"learning_rate": 1e-3, "model.attention_options.qk_norm": True}, [0.5]),
        ({"learning_rate": 2e-3, "model.attention_options.qk_norm": False}, [0.25]),
    ]
    assert [one.label for one in found.rounds[0].tried] == list(losses)
    assert Evidence.from_dict(json.loads(json.dumps(asdict(found)))) == found


def test_a_row_may_tune_more_than_the_others() -> None:
    rope = Row("rope", tuned={"model.attention_options.theta": (1e4, 5e5)})
    cells = grid_of(of_flip_flop(rows=("tra", rope), tuning=RATES)).tuning_cells()
    assert [cell.choice_label for cell in cells if cell.row == "tra"] == ["learning_rate=0.001", "learning_rate=0.02"]
    assert {cell.recipe.model.attention_options["theta"] for cell in cells if cell.row == "rope"} == {1e4, 5e5}
    assert len([cell for cell in cells if cell.row == "rope"]) == 4
    with pytest.raises(ValueError, match="row 'rope clip=2' must not set what is tuned, got clip"):
        of_flip_flop(rows=(Row("rope", changes={"clip": 2.0}, tuned={"clip": (1.0, 2.0)}),), tuning=RATES)


def test_runs_here_keep_their_place_when_another_seed_turns_first_and_second_choice(
    tmp_path: Path, run_here: list[list[Cell]], undecided: None
) -> None:
    """The run that was the first choice stays where it is, and is not trained again."""
    replace(BOTH, tuning=replace(TWO_SEEDS, seeds=(1000,))).perform(Request(tmp_path, "smoke"))
    before = files_below(tmp_path / "runs")
    run_here.clear()
    found = BOTH.perform(Request(tmp_path, "smoke"))
    assert [[cell.recipe.seed for cell in cells] for cells in run_here] == [[1001, 1001], [0, 1]]
    assert rates(found.content) == {"tra": 1e-3, "tra (second choice)": 2e-2}
    assert found.failures == {}
    after = files_below(tmp_path / "runs")
    assert {name: after[name] for name in before if "inspection" not in str(name)} == {
        name: content for name, content in before.items() if "inspection" not in str(name)
    }


def test_settings_that_results_do_not_tell_keep_results_in_their_rows(
    tmp_path: Path, run_here: list[list[Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record knows its rate and options alone."""
    losses = {(0.0, 1000): 1.0, (0.1, 1000): 1.1, (0.0, 1001): 1.2, (0.1, 1001): 1.2}
    make_up_losses(monkeypatch, lambda recipe: losses[recipe.weight_decay, recipe.seed])
    experiment = of_flip_flop(rows=("tra",), tuning=Tuning({"weight_decay": (0.0, 0.1)}, seeds=(1000, 1001)))
    found = experiment.perform(Request(tmp_path / "a", "smoke"))
    assert {record.row for record in found.records} == {"tra", "tra (second choice)"}
    joined = experiment.perform(Request(tmp_path / "b", "smoke", train=False, join=[tmp_path / "a" / "results.json"]))
    assert joined.content["results"] == found.content["results"]

    one = replace(experiment, tuning=Tuning({"weight_decay": (0.0, 0.1)}))
    monkeypatch.setitem(losses, (0.0, 1000), 1.3)
    one.perform(Request(tmp_path / "one", "smoke"))  # which chooses the other
    files = [tmp_path / name / "results.json" for name in ("one", "a")]
    for order in (files, files[::-1]):
        with pytest.raises(ValueError, match=r"tuning of flip_flop tra chose .*weight_decay"):
            experiment.perform(Request(tmp_path / "c", "smoke", train=False, join=order))


def test_results_of_a_row_that_tunes_more_now_are_left_out_of_a_join(
    tmp_path: Path, run_here: list[list[Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("tra.experiments.merge_results.say", told.append)
    of_flip_flop(rows=("tra", "rope"), tuning=RATES).perform(Request(tmp_path / "a", "smoke"))
    now = of_flip_flop(rows=("tra", Row("rope", tuned={"model.attention_options.theta": (1e4, 5e5)})), tuning=RATES)
    found = now.perform(Request(tmp_path / "b", "smoke", train=False, join=[tmp_path / "a" / "results.json"]))
    assert {record.row for record in found.records} == {"tra"}
    field = "model.attention_options.theta"
    assert told == [f"results of flip_flop rope that are joined are left out: {field} is tuned here and was not there"]


@pytest.mark.parametrize("values", [(None, 1, 2), ("a", "b", "c"), ([1], [2], [3]), (True, False, True)])
def test_only_numbers_have_edges(values: tuple[Any, ...]) -> None:
    tried = [Tried({"field": value}, [1.0]) for value in values]
    assert edges_of(Evidence("copy", [1000], [Round(1.0, tried)], tried[0].settings)) == []

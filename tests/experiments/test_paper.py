"""What the paper's table and figures are made of."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tra.experiments.rates import RATES, losses_by_rate
from tra.recipes.rates import SMALL, UNTUNED, small_rate

from tests.experiments.small import PNG, content_of, files_below, made_in, smoke
from tra.attention import MECHANISMS
from tra.cli import main
from tra.experiments import Outcome
from tra.experiments.base import Cell, outcome_of
from tra.experiments.demo import DEMO
from tra.experiments.figure1 import FIGURE1
from tra.experiments.figure2 import FIGURE2
from tra.experiments.figure3 import FIGURE3, TEXT
from tra.experiments.table1 import PAPER, SMALL_SCALE, SMOKE, TABLE1
from tra.experiments.tuning import best_choices
from tra.recipes import RECIPES
from tra.recipes.strings import SETS
from tra.report import Record
from tra.report.records import grouped
from tra.tasks import ExactMatch

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_paper_scale_has_the_papers_numbers() -> None:
    columns = {column: recipe_of() for column, recipe_of in PAPER.items()}
    assert list(columns) == ["flip_flop", "copy_unique", "copy_repeat", "induct_once", "induct_recent", "instructed"]
    flips = columns.pop("flip_flop")
    assert (flips.length, flips.steps, flips.batch) == (512, 25_000, 64)
    assert (flips.data, flips.examples) == ("fixed", flips.steps * flips.batch)
    assert {(entry.name, entry.length) for entry in flips.evaluations} == {
        ("iid", 512),
        ("sparse", 512),
        ("dense", 512),
    }
    for name, recipe in columns.items():
        assert (recipe.task, recipe.length, recipe.batch) == (name, 50, 128)
        assert recipe.steps * recipe.batch == 4_000_000
        assert recipe.data == "fresh"  # one pass: no string is seen twice on purpose
        lengths = [entry.length for entry in recipe.evaluations]
        assert (min(lengths), max(lengths)) == (50, 500 if name == "instructed" else 300)
        assert {entry.name for entry in recipe.evaluations} == set(SETS[name])
    for recipe in (flips, *columns.values()):
        model = recipe.model
        assert (model.layers, model.heads, model.width, model.kv_heads) == (4, 4, 256, None)
        assert (recipe.seed, recipe.precision) == (0, "no")
    assert [recipe_of() for recipe_of in FIGURE1.scales["paper"].values()] == [flips]


def test_table1_and_tuning_compare_every_mechanism_at_three_scales() -> None:
    assert tuple(TABLE1.rows) == tuple(RATES.rows) == tuple(MECHANISMS)
    assert set(TABLE1.scales) == set(RATES.scales) == set(FIGURE1.scales) == set(FIGURE2.scales)
    assert set(TABLE1.scales) == {"smoke", "small", "paper"}
    assert TABLE1.seeds == 3


def test_a_whole_table_of_one_seed_comes_before_the_next_seed(tmp_path: Path) -> None:
    cells = TABLE1.cells(tmp_path, "smoke", 3, TABLE1.chosen_rows(["tra", "fot"]))
    assert [cell.recipe.seed for cell in cells] == [0] * 12 + [1] * 12 + [2] * 12
    assert len({cell.folder for cell in cells}) == len(set(cells)) == 36
    assert {cell.recipe.model.attention for cell in cells} == {"tra", "fot"}
    for cell in cells:
        assert cell.folder == tmp_path / "runs" / cell.column / cell.row / str(cell.recipe.seed)


def test_a_row_of_the_small_table_is_the_recipe_that_tra_train_has(tmp_path: Path) -> None:
    cells = TABLE1.cells(tmp_path, "small", 1, TABLE1.chosen_rows(["differential", "rope"]))
    for cell in cells:
        name = "flip-flop-narrow" if cell.column == "flip_flop" else f"{cell.column.replace('_', '-')}-small"
        assert cell.recipe == RECIPES[name](attention=cell.row)


def test_tuned_learning_rates_are_those_of_the_small_scale_alone(tmp_path: Path) -> None:
    rows = TABLE1.chosen_rows(["rope", "differential"])
    for cell in TABLE1.cells(tmp_path, "small", 1, rows):
        assert cell.recipe.learning_rate == SMALL[cell.row]
        assert cell.tuned
    (paper,) = FIGURE1.cells(tmp_path, "paper", 1, FIGURE1.chosen_rows(["differential"]))
    assert paper.recipe.learning_rate == PAPER["flip_flop"]().learning_rate != SMALL["differential"]
    assert not paper.tuned
    assert small_rate("one of my own") == UNTUNED


def test_learning_rates_are_those_that_the_stored_evidence_says() -> None:
    """Of every mechanism the rate with the lowest loss at the training length, as it was measured."""
    stored = json.loads((RESULTS / "tuning" / "results.json").read_text())
    trained = {column: recipe["length"] for column, recipe in stored["recipes"].items()}
    records = [
        Record(
            row["column"], row["attention"], row["seed"], trained[row["column"]], "symbols", ExactMatch.from_dict(row)
        )
        for row in stored["results"]
    ]
    best = best_choices(losses_by_rate(Outcome([], records)))
    assert {row: float(rate) for (_, row), rate in best.items()} == SMALL
    grid = {float(column) for column in RATES.scales["small"]}
    assert set(map(float, trained)) == grid


def test_tuning_has_a_column_for_each_learning_rate() -> None:
    for scale, table in (("paper", PAPER), ("small", SMALL_SCALE), ("smoke", SMOKE)):
        usual = table["induct_once"]()
        columns = {column: recipe_of() for column, recipe_of in RATES.scales[scale].items()}
        assert all(float(column) == recipe.learning_rate for column, recipe in columns.items())
        assert usual.learning_rate in {recipe.learning_rate for recipe in columns.values()}
        assert {replace(recipe, learning_rate=usual.learning_rate) for recipe in columns.values()} == {usual}
    assert len(RATES.scales["paper"]) == 4
    assert list(RATES.scales["small"]) == ["0.001", "0.002", "0.004"]


def test_rates_are_chosen_by_the_loss_at_the_training_length() -> None:
    """The higher rate is better past it, and at it only for "a", by the mean over seeds."""
    at = {
        ("a", "0.001"): (1.0, 3.0),
        ("a", "0.002"): (2.0, 1.5),
        ("b", "0.001"): (1.0, 1.0),
        ("b", "0.002"): (4.0, 0.5),
    }
    records = [
        Record(
            rate, row, seed, 8, "symbols", ExactMatch("set", length, 4, None, loss if length == 8 else past, None, 0, 0)
        )
        for (row, rate), losses in at.items()
        for seed, loss in enumerate(losses)
        for length, past in ((8, 0.0), (16, 0.1 if rate == "0.002" else 9.0))
    ]
    losses = losses_by_rate(Outcome([], records))
    assert losses == {("", "a"): {"0.001": 2.0, "0.002": 1.75}, ("", "b"): {"0.001": 1.0, "0.002": 2.25}}
    assert best_choices(losses) == {("", "a"): "0.002", ("", "b"): "0.001"}


@pytest.mark.usefixtures("run_here")
def test_tuning_ends_in_a_table_with_the_lowest_loss_of_each_mechanism_bold(tmp_path: Path) -> None:
    assert main(smoke("tuning", tmp_path, "--seeds", "1", "--attention", "tra,rope")) == 0
    table = (tmp_path / "table.md").read_text()
    heading, _, *lines = table[table.index("| attention") :].splitlines()
    assert heading == "| attention | 0.001 | 0.002 |"
    rows = content_of(tmp_path)["results"]
    assert len(lines) == 2
    for line, attention in zip(lines, ("tra", "rope"), strict=True):
        name, *shown = line.strip("| ").split(" | ")
        found = {row["column"]: row["loss"] for row in rows if row["attention"] == attention and row["length"] == 8}
        assert name == attention
        assert [text.strip("*") for text in shown] == [f"{found[rate]:.4f}" for rate in ("0.001", "0.002")]
        assert [text.startswith("**") for text in shown] == [loss == min(found.values()) for loss in found.values()]


@pytest.mark.usefixtures("run_here")
def test_figure1_shows_tra_beside_fot(tmp_path: Path, drawn: list[Figure]) -> None:
    assert main(smoke("figure1", tmp_path, "--seeds", "1")) == 0
    assert (tmp_path / "attention.png").read_bytes().startswith(PNG)
    (figure,) = drawn
    titles = [panel.get_title() for panel in figure.axes if panel.images]
    assert titles == [f"{name}, layer 1, head {head}" for name in ("tra", "fot") for head in (1, 2)]
    assert all(panel.images[0].get_array().shape == (32, 32) for panel in figure.axes if panel.images)
    content = content_of(tmp_path)
    assert (content["runs"], content["finished"]) == (2, 2)


@pytest.mark.usefixtures("small_texts", "run_here")
def test_figure3_in_the_folder_of_figure2_trains_nothing_and_spoils_nothing(
    tmp_path: Path, drawn: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "figure"
    assert main(smoke("figure2", folder, "--seeds", "1", "--attention", "tra,rope")) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    capsys.readouterr()
    assert main(smoke("figure3", folder)) == 0
    heads = (folder / "heads.md").read_text()
    assert heads in capsys.readouterr().out
    assert len(heads.splitlines()) == 2 + 2 * 2
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((folder / "figure3.json").read_text())["sessions"] == []
    assert (folder / "attention.png").read_bytes().startswith(PNG)
    shown = [label.get_text() for label in drawn[-1].axes[0].get_yticklabels()]
    assert "".join(shown) == TEXT


@pytest.mark.usefixtures("small_texts")
def test_figure2_ends_in_tables_of_perplexity_and_a_figure(
    tmp_path: Path, drawn: list[Figure], run_here: list[list[Cell]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "figure"
    command = smoke("figure2", folder, "--seeds", "2", "--attention", "tra,rope")
    assert main(command) == 0
    table = (folder / "table.md").read_text()
    shown = capsys.readouterr().out
    assert table in shown
    assert shown.splitlines()[-1] == str(folder)
    made = made_in(folder)
    assert made == {"table.md", "table.tex", "table.csv", "perplexity.png", "report.html", "results.json"}
    assert (folder / "perplexity.png").read_bytes().startswith(PNG)

    # Three windows, of two mechanisms with two seeds.
    content = content_of(folder)
    rows = content["results"]
    assert (content["runs"], content["finished"], len(rows)) == (4, 4, 12)
    assert {(row["length"], row["stride"]) for row in rows} == {(16, None), (32, None), (32, 8)}
    assert {row["tokens"] for row in rows} == {128}
    assert content["recipes"]["wikitext103"]["task_options"]["evaluation"] == "wikitext-103"

    def means(measure: str, length: int, stride: int | None) -> dict[str, float]:
        mine = [row for row in rows if (row["length"], row["stride"]) == (length, stride)]
        return {name: sum(row[measure] for row in mine if row["attention"] == name) / 2 for name in ("tra", "rope")}

    parts = table.split("## ")[1:]
    assert [part.splitlines()[0] for part in parts] == [
        f"Perplexity per {unit}, valid, {how}"
        for unit in ("token", "word", "byte")
        for how in ("windows side by side", "sliding windows")
    ]
    for part, measure in zip(parts[::2], ("perplexity", "perplexity_per_word", "perplexity_per_byte"), strict=True):
        assert " No mechanism was tuned. " in part
        lines = part[part.index("| attention") :].splitlines()
        assert lines[0] == "| attention | 16 | 32 |"
        assert lines[4] == "| test sequences | 8 | 4 |"
        cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in lines[2:4]}
        for column, length in enumerate((16, 32)):
            expected = means(measure, length, None)
            lowest = min(expected.values())
            for name, mean in expected.items():
                text = cells[name][column]
                assert text.startswith("**") == (round(mean, 4) == round(lowest, 4))
                assert float(text.strip("*").split(" ± ")[0]) == pytest.approx(mean, abs=0.006)
                low, high = (float(bound) for bound in text.strip("*]").split(" [")[1].split(", "))
                assert low - 0.01 <= mean <= high + 0.01
    assert "| attention | 32 by 8 |" in parts[1]

    with open(folder / "table.csv", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["measure"] == "perplexity"]
    assert len(lines) == 6
    for line in lines:
        expected = means("perplexity", int(line["length"]), 8 if "stride 8" in line["set"] else None)
        assert float(line["mean"]) == pytest.approx(expected[line["attention"]], abs=1e-5)

    windows, positions = drawn[-1].axes
    assert [line.get_label() for line in windows.lines] == ["tra", "rope"]
    assert [line.get_xdata().tolist() for line in windows.lines] == [[16, 32]] * 2
    assert [line.get_xdata().tolist() for line in positions.lines] == [[2, 4, 8, 16, 32]] * 2
    for line in windows.lines:
        expected = [means("perplexity", length, None)[str(line.get_label())] for length in (16, 32)]
        assert line.get_ydata().tolist() == pytest.approx(expected)

    # All of it from what is stored.
    before, first = files_below(folder / "runs"), {name: (folder / name).read_bytes() for name in made}
    for name in made:
        (folder / name).unlink()
    assert main([*command, "--no-train"]) == 0
    assert len(run_here) == 1
    assert files_below(folder / "runs") == before
    for name in ("table.md", "table.tex", "table.csv"):
        assert (folder / name).read_bytes() == first[name]
    assert (folder / "perplexity.png").read_bytes().startswith(PNG)
    assert content_of(folder)["results"] == rows


@pytest.mark.usefixtures("run_here")
def test_figure2_without_its_text_says_what_is_missing(
    tmp_path: Path, small_texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_texts / "wikitext-103" / "valid.txt").unlink()
    assert main(smoke("figure2", tmp_path / "figure", "--seeds", "1", "--attention", "tra")) == 1
    error = capsys.readouterr().err
    assert "is finished: " in error
    assert str(small_texts / "wikitext-103") in error
    assert "valid" in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("small_texts")
def test_figure2_compares_six_mechanisms_on_the_same_windows(tmp_path: Path) -> None:
    assert tuple(FIGURE2.rows) == ("tra", "rope", "nope", "alibi", "fot", "cope")
    assert FIGURE3.scales == FIGURE2.scales
    for scale in ("paper", "small", "smoke"):
        (usual,) = (recipe_of() for recipe_of in FIGURE2.scales[scale].values())
        cells = FIGURE2.cells(tmp_path, scale, 2, FIGURE2.chosen_rows(()))
        assert len({cell.folder for cell in cells}) == len(cells) == 12
        assert {replace(cell.recipe, seed=0, model=usual.model) for cell in cells} == {usual}


def test_the_demonstration_says_in_how_many_seeds_everything_is_right(tmp_path: Path) -> None:
    cells = DEMO.cells(tmp_path, "smoke", 3, DEMO.chosen_rows(()))
    right = {("tra", 0): 1.0, ("tra", 1): 1.0, ("tra", 2): 0.75, ("rope", 0): 0.5, ("rope", 1): 1.0, ("rope", 2): 0.25}
    outcome = outcome_of(
        {
            cell: [
                ExactMatch("iid", 8, 4, None, 0.1, None, 1.0, 1.0),
                ExactMatch("iid", 64, 4, None, 0.1, None, right[cell.row, cell.recipe.seed], 1.0),
            ]
            for cell in cells
        }
    )
    by_length, by_seed = DEMO.tables(outcome)
    assert list(by_length.headings) == ["attention", "set", "8", "64"]
    assert [list(row) for row in by_seed.rows] == [["tra", "2 of 3", "0.750"], ["rope", "1 of 3", "0.250"]]
    one = [record for record in outcome.records if record.seed == 0]
    assert len(DEMO.tables(Outcome(outcome.cells[:2], one))) == 1
    assert len(grouped(one, lambda record: record.row)) == 2


@pytest.mark.usefixtures("run_here")
def test_the_demonstration_is_an_experiment_like_the_others(tmp_path: Path, drawn: list[Figure]) -> None:
    assert main(smoke("demo", tmp_path, "--figures", "png")) == 0
    assert {"accuracy.png", "attention.png", "table.md", "table.tex", "results.json"} <= made_in(tmp_path)
    accuracy, attention = drawn
    assert [line.get_label() for line in accuracy.axes[0].lines] == ["tra", "rope"]
    assert {panel.get_title().split(",")[0] for panel in attention.axes if panel.images} == {"tra"}

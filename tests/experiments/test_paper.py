"""What the paper's table and figures are made of."""

import csv
import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from matplotlib.figure import Figure

from tests.experiments.conftest import REPRODUCE, write_small_texts
from tests.experiments.small import PNG, content_of, grid_of, made_in, smoke
from tra.attention import MECHANISMS
from tra.cli import main
from tra.experiments import Experiment, Outcome, Request, Row
from tra.experiments.aids import AIDS
from tra.experiments.demo import DEMO
from tra.experiments.figure1 import FIGURE1
from tra.experiments.figure2 import FIGURE2
from tra.experiments.figure3 import FIGURE3, TEXT
from tra.experiments.grid import chosen_rows
from tra.experiments.local_jobs import run_cell
from tra.experiments.longer import LONGER
from tra.experiments.norms import COMPARED, NORMS
from tra.experiments.passkey import PASSKEY
from tra.experiments.perform import wanted_runs
from tra.experiments.results import records_of
from tra.experiments.rows import as_row
from tra.experiments.steps import STEPS, STEPS_OF
from tra.experiments.table1 import AIDED, PAPER, SMALL_SCALE, TABLE1
from tra.experiments.tuning import Evidence
from tra.model import Decoder
from tra.recipes import RECIPES, RecipeOf
from tra.recipes.strings import SETS
from tra.report.figures import save_figure
from tra.report.records import grouped
from tra.tasks import TASKS, ExactMatch, Perplexity

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FIGURE2_MADE = {"table.md", "table.tex", "table.csv", "perplexity.png", "report.html", "results.json"}


def test_paper_scale_has_the_papers_numbers() -> None:
    columns = {column: recipe_of() for column, recipe_of in PAPER.items()}
    assert list(columns) == ["flip_flop", "copy_unique", "copy_repeat", "induct_once", "induct_recent", "instructed"]
    flips = columns.pop("flip_flop")
    assert (flips.length, flips.steps, flips.batch) == (512, 20_000, 64)
    assert (flips.data, flips.examples) == ("fixed", 1_600_000)
    assert {(entry.name, entry.length) for entry in flips.evaluations} == {
        ("iid", 512),
        ("sparse", 512),
        ("dense", 512),
    }
    for name, recipe in columns.items():
        assert (recipe.task, recipe.length, recipe.batch) == (name, 50, 128)
        assert recipe.steps == 100_000
        assert recipe.data == "fresh"  # one pass: no string is seen twice on purpose
        lengths = [entry.length for entry in recipe.evaluations]
        assert (min(lengths), max(lengths)) == (50, 500 if name == "instructed" else 300)
        assert {entry.name for entry in recipe.evaluations} == set(SETS[name])
    for recipe in (flips, *columns.values()):
        model = recipe.model
        assert (model.layers, model.heads, model.width, model.kv_heads) == (4, 4, 256, None)
        assert (recipe.seed, recipe.precision, recipe.warmup) == (0, "no", 0.05)
    assert [recipe_of() for recipe_of in FIGURE1.scales["paper"].values()] == [flips]


def test_table1_compares_every_mechanism_on_synthetic_tasks_at_three_scales() -> None:
    tuned = Row("rope", tuned={"model.attention_options.theta": (10_000.0, 500_000.0)})
    assert tuned in TABLE1.rows
    rows = [as_row(row).label for row in TABLE1.rows]
    more = ["rope theta=10000", "rope theta=500000", "tra straight_through=0.5"]
    assert sorted(rows) == sorted([*MECHANISMS, *more])
    assert set(TABLE1.scales) == set(FIGURE1.scales) == set(FIGURE2.scales) == {"smoke", "small", "paper"}
    elsewhere = {"text", "passkey", "majority", "n_back"}
    assert set(TABLE1.scales["small"]) == set(TABLE1.scales["smoke"]) == set(TASKS) - elsewhere


def test_a_whole_table_of_one_seed_comes_before_the_next_seed(tmp_path: Path) -> None:
    cells = grid_of(TABLE1, tmp_path, seeds=3, attention=["tra", "fot"]).cells()
    assert [cell.recipe.seed for cell in cells] == [0] * 24 + [1] * 24 + [2] * 24
    assert len({cell.folder for cell in cells}) == len(set(cells)) == 72
    assert {cell.recipe.model.attention for cell in cells} == {"tra", "fot"}
    for cell in cells:
        assert cell.folder == tmp_path / "runs" / cell.column / cell.row / str(cell.recipe.seed)


def test_a_row_of_the_small_table_is_the_recipe_that_tra_train_has_before_it_is_tuned(tmp_path: Path) -> None:
    cells = grid_of(TABLE1, tmp_path, "small", seeds=1, attention=["differential", "fot"]).cells()
    for cell in cells:
        assert cell.recipe == RECIPES[f"{cell.column.replace('_', '-')}-small"](attention=cell.row)


def test_the_protocol_is_the_same_for_every_mechanism_and_task() -> None:
    """Learning rate and QK-norm, by halving, on a seed that is not reported; the grid goes on at its ends."""
    for experiment in (TABLE1, FIGURE2):
        for scale in ("small", "paper"):
            own = grid_of(experiment, scale=scale)
            assert own.tuning is not None
            assert (own.tuning.rows, own.tuning.column, own.tuning.extended) == (None, None, "learning_rate")
            assert own.tuning.grid["model.attention_options.qk_norm"] == (True, False)
            assert not set(own.tuning.seeds) & set(range(own.seeds))
        assert grid_of(experiment, scale="smoke").tuning is None
        assert (grid_of(experiment, scale="small").seeds, grid_of(experiment, scale="paper").seeds) == (3, 4)
    grid = grid_of(TABLE1, scale="small").tuning.grid["learning_rate"]  # type: ignore[union-attr]
    assert all(recipe_of().learning_rate in grid for recipe_of in SMALL_SCALE.values())


@pytest.mark.usefixtures("run_here")
def test_figure1_shows_tra_beside_fot(tmp_path: Path, drawn: list[Figure]) -> None:
    assert main(smoke("figure1", tmp_path, "--seeds", "1")) == 0
    assert (tmp_path / "attention.png").read_bytes().startswith(PNG)
    (figure,) = drawn
    panels = [panel for panel in figure.axes if panel.get_title()]
    titles = [panel.get_title() for panel in panels]
    assert titles == [f"{name}, layer 1, head {head}" for name in ("tra", "fot") for head in (1, 2)]
    assert all(len(panel.get_xticks()) == len(panel.get_yticks()) == 32 for panel in panels)
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
    heads = (folder / "figure3.md").read_text()
    assert heads in capsys.readouterr().out
    assert len(heads.splitlines()) == 2 + 2 * 2
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((folder / "figure3.json").read_text())["sessions"] == []
    assert (folder / "attention.png").read_bytes().startswith(PNG)
    shown = [label.get_text() for label in drawn[-1].axes[0].get_yticklabels()]
    assert "".join(shown) == TEXT


class Figure2(NamedTuple):
    """What one command left behind: three windows, of two mechanisms with two seeds."""

    folder: Path
    shown: str
    figure: Figure
    rows: list[dict[str, Any]]

    def means(self, measure: str, length: int, stride: int | None) -> dict[str, float]:
        mine = [row for row in self.rows if (row["length"], row["stride"]) == (length, stride)]
        return {name: sum(row[measure] for row in mine if row["attention"] == name) / 2 for name in ("tra", "rope")}


@pytest.fixture(scope="module")
def figure2(tmp_path_factory: pytest.TempPathFactory) -> Figure2:
    """Run once for all tests, which leave the folder as it is."""
    place, shown = tmp_path_factory.mktemp("figure2"), io.StringIO()
    figures: list[Figure] = []

    def drawn(figure: Figure, path: Path) -> None:
        figures.append(figure)
        save_figure(figure, path)

    command = smoke("figure2", place / "figure", "--seeds", "2", "--attention", "tra,rope")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        write_small_texts(place, patch)
        patch.setattr(REPRODUCE, "run_all", lambda cells, jobs: [run_cell(cell) for cell in cells])
        patch.setattr(REPRODUCE, "save_figure", drawn)
        assert main(command) == 0
    folder = place / "figure"
    return Figure2(folder, shown.getvalue(), figures[-1], content_of(folder)["results"])


def test_figure2_writes_tables_a_figure_and_a_report(figure2: Figure2) -> None:
    assert (figure2.folder / "table.md").read_text() in figure2.shown
    assert figure2.shown.splitlines()[-1] == str(figure2.folder)
    assert made_in(figure2.folder) == FIGURE2_MADE
    assert (figure2.folder / "perplexity.png").read_bytes().startswith(PNG)


def test_figure2_measures_every_window(figure2: Figure2) -> None:
    content = content_of(figure2.folder)
    assert (content["runs"], content["finished"], len(figure2.rows)) == (4, 4, 12)
    assert {(row["length"], row["stride"]) for row in figure2.rows} == {(16, None), (32, None), (32, 8)}
    assert {row["tokens"] for row in figure2.rows} == {128}
    assert content["recipes"]["wikitext103"]["task_options"]["evaluation"] == "wikitext-103"


def test_figure2_has_a_table_for_each_unit_and_kind_of_window(figure2: Figure2) -> None:
    table = (figure2.folder / "table.md").read_text()
    assert table.startswith("## Difference to tra\n")
    parts = table.split("## ")[2:]
    assert [part.splitlines()[0] for part in parts] == [
        f"Perplexity per {unit}, valid, {how}"
        for unit in ("token", "word", "byte")
        for how in ("windows side by side", "sliding windows")
    ]
    assert "| attention | 32 by 8 |" in parts[1]


def test_tables_of_figure2_hold_means_with_the_lowest_bold_and_intervals_around_them(figure2: Figure2) -> None:
    parts = (figure2.folder / "table.md").read_text().split("## ")[2:]
    for part, measure in zip(parts[::2], ("perplexity", "perplexity_per_word", "perplexity_per_byte"), strict=True):
        assert " No mechanism was tuned. " in part
        lines = part[part.index("| attention") :].splitlines()
        assert lines[0] == "| attention | 16 | 32 |"
        assert lines[4] == "| test sequences | 8 | 4 |"
        cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in lines[2:4]}
        for column, length in enumerate((16, 32)):
            expected = figure2.means(measure, length, None)
            lowest = min(expected.values())
            for name, mean in expected.items():
                text = cells[name][column]
                assert text.startswith("**") == (round(mean, 4) == round(lowest, 4))
                assert float(text.strip("*").split(" ± ")[0]) == pytest.approx(mean, abs=0.006)
                low, high = (float(bound) for bound in text.strip("*]").split(" [")[1].split(", "))
                assert low - 0.01 <= mean <= high + 0.01


def test_the_csv_of_figure2_holds_the_same_means(figure2: Figure2) -> None:
    with open(figure2.folder / "table.csv", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["measure"] == "perplexity"]
    assert len(lines) == 6
    for line in lines:
        expected = figure2.means("perplexity", int(line["length"]), 8 if "stride 8" in line["set"] else None)
        assert float(line["mean"]) == pytest.approx(expected[line["attention"]], abs=1e-5)


def test_figure2_draws_the_same_means_by_window_and_the_loss_by_position(figure2: Figure2) -> None:
    windows, positions = figure2.figure.axes
    assert [line.get_label() for line in windows.lines] == ["tra", "rope"]
    assert [line.get_xdata().tolist() for line in windows.lines] == [[16, 32]] * 2
    assert [line.get_xdata().tolist() for line in positions.lines] == [[2, 4, 8, 16, 32]] * 2
    for line in windows.lines:
        expected = [figure2.means("perplexity", length, None)[str(line.get_label())] for length in (16, 32)]
        assert line.get_ydata().tolist() == pytest.approx(expected)


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
def test_figure2_compares_mechanisms_on_the_same_windows(tmp_path: Path) -> None:
    others = ("fot", "alibi", "rope", "rope theta=500000", "cope", "stick-breaking", "selective")
    rows = [as_row(row).label for row in FIGURE2.rows]
    assert rows == [
        *("tra", "tra straight_through=0.5", "tra-learned", "tra-distance-only"),
        *(*others, "nape", "ssmax", "asentmax"),
    ]
    for scale in FIGURE2.scales:
        assert grid_of(FIGURE3, scale=scale).tuning == grid_of(FIGURE2, scale=scale).tuning, (
            "or it would not find the model of figure 2"
        )
    assert FIGURE3.scales == FIGURE2.scales
    for scale in ("paper", "small", "smoke"):
        (usual,) = (recipe_of() for recipe_of in FIGURE2.scales[scale].values())
        cells = grid_of(FIGURE2, tmp_path, scale, seeds=2).cells()
        assert len({cell.folder for cell in cells}) == len(cells) == 28
        assert {replace(cell.recipe, seed=0, model=usual.model) for cell in cells} == {usual}


@pytest.mark.usefixtures("small_texts", "run_here")
def test_perplexity_is_drawn_against_training_steps(tmp_path: Path, drawn: list[Figure]) -> None:
    assert main(smoke("steps", tmp_path, "--attention", "tra,fot")) == 0
    assert (tmp_path / "steps.png").read_bytes().startswith(PNG)
    assert [panel.get_title() for panel in drawn[-1].axes] == ["windows of 16", "windows of 32"]
    titles = [line for line in (tmp_path / "table.md").read_text().splitlines() if "Difference" in line]
    assert titles == [f"## Difference to tra after {steps} steps" for steps in ("600", "1,200", "2,400", "4,800")]


def test_each_point_stands_at_the_steps_of_its_column() -> None:
    assert {column: recipe_of().steps for column, recipe_of in STEPS.scales["small"].items()} == STEPS_OF
    perplexities = {column: 100.0 / place for place, column in enumerate(STEPS_OF, 1)}
    cells = grid_of(STEPS, Path(), "small", seeds=1, attention=["tra", "fot"]).cells()
    records = []
    for cell in cells:
        value = perplexities[cell.column] * (1 + (cell.row == "fot"))
        records += records_of(
            cell,
            [Perplexity("valid", at, 4, None, 1.0, None, 9, 9, 9, value, 1.0, 1.0, []) for at in (128, 1024)],
        )
    outcome = Outcome(cells, records)
    for panel in STEPS.figures(outcome)["steps"].axes:
        ours, others = panel.lines
        assert (ours.get_label(), others.get_label()) == ("tra", "fot")
        assert ours.get_xdata().tolist() == others.get_xdata().tolist() == [600, 1200, 2400, 4800]
        assert ours.get_ydata().tolist() == pytest.approx(list(perplexities.values()))
        assert others.get_ydata().tolist() == pytest.approx([2 * value for value in perplexities.values()])


def test_training_for_longer_goes_on_from_what_figure2_has_tuned_and_trained(tmp_path: Path) -> None:
    request = Request(
        tmp_path / "steps",
        "small",
        attention=["tra", "fot"],
        columns=["wikitext103", "1200_steps"],
        train=False,
        join=[RESULTS / "figure2" / "results.json"],
    )
    stored = json.loads(request.join[0].read_text())
    outcome = STEPS.perform(request)
    assert {(record.column, record.row, record.seed) for record in outcome.records} == {
        ("wikitext103", "tra", 0),
        ("wikitext103", "fot", 0),
    }
    search, cells, joined = wanted_runs(STEPS, request)
    # What was tuned on one seed lacks the other of the last round, and nothing else.
    assert {(cell.share, cell.recipe.seed) for cell in search.next()} <= {(0.4, 1001)}
    assert [(cell.column, cell.row) for cell in cells if cell.key not in joined.records] == [
        ("1200_steps", "tra"),
        ("1200_steps", "fot"),
    ]
    for row in ("tra", "fot"):
        found, known = (content["tuning"][f"wikitext103 {row}"] for content in (outcome.content, stored))
        assert Evidence.from_dict(found) == Evidence.from_dict(known)


def test_the_demonstration_says_in_how_many_seeds_everything_is_right(tmp_path: Path) -> None:
    cells = grid_of(DEMO, tmp_path, seeds=3).cells()
    right = {("tra", 0): 1.0, ("tra", 1): 1.0, ("tra", 2): 0.75, ("rope", 0): 0.5, ("rope", 1): 1.0, ("rope", 2): 0.25}
    records = []
    for cell in cells:
        within = ExactMatch("iid", 8, 4, None, 0.1, None, 1.0, 1.0)
        past = ExactMatch("iid", 64, 4, None, 0.1, None, right[cell.row, cell.recipe.seed], 1.0)
        records += records_of(cell, [within, past])
    outcome = Outcome(cells, records)
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
    assert {panel.get_title().split(",")[0] for panel in attention.axes if panel.get_title()} == {"tra"}


@pytest.mark.parametrize("experiment", [AIDS, LONGER, PASSKEY, STEPS], ids=["aids", "longer", "passkey", "steps"])
def test_what_the_paper_has_not_is_tuned_like_what_it_has(experiment: Experiment) -> None:
    small = grid_of(experiment, scale="small")
    assert small.tuning is not None
    assert small.tuning.grid in [other.tuning.grid for other in (TABLE1, FIGURE2) if other.tuning]
    assert grid_of(experiment, scale="smoke").tuning is None
    for recipe_of in small.columns.values():
        assert min(entry.length for entry in recipe_of().evaluations) == recipe_of().length, "or it cannot be tuned"


@pytest.mark.parametrize("recipe_of", [*SMALL_SCALE.values(), *FIGURE2.scales["small"].values()])
def test_a_learned_threshold_starts_from_the_weights_of_a_fixed_one(recipe_of: RecipeOf) -> None:
    states = []
    for row in (Row("tra-learned"), AIDED):
        torch.manual_seed(7)
        states.append(Decoder(row.recipe(recipe_of, 0).model).state_dict())
    ours, theirs = states
    assert {name.rpartition(".")[2] for name in set(ours) - set(theirs)} == {"threshold_bias"}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_every_aid_is_read_as_published_tra_is(tmp_path: Path) -> None:
    """Its trained weights in a decoder without the aid give the same numbers."""
    for row in chosen_rows(AIDS.rows, ()):
        recipe = row.recipe(AIDS.scales["smoke"]["induct_once"], 0)
        aided = Decoder(recipe.model).eval()
        published = Decoder(replace(recipe.model, attention_options={})).eval()
        published.load_state_dict(aided.state_dict())
        tokens = torch.randint(recipe.model.vocabulary, (2, 30))
        with torch.no_grad():
            assert torch.equal(aided(tokens), published(tokens))


def test_both_kinds_of_qk_norm_are_rows_of_their_own_and_are_not_tuned(tmp_path: Path) -> None:
    small = grid_of(NORMS, scale="small")
    assert small.tuning is not None
    assert list(small.tuning.grid) == ["learning_rate"]
    cells = grid_of(NORMS, tmp_path, "small", seeds=1).cells()
    norms = {(cell.recipe.model.attention, cell.recipe.model.attention_options["qk_norm"]) for cell in cells}
    assert norms == {(name, norm) for name in COMPARED for norm in (True, False)}

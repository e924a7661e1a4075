"""What the figures show, read from the figures themselves and from their pixels."""

import xml.etree.ElementTree
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy
import pytest
import torch
from matplotlib.figure import Figure

from tests.faults import full_disk
from tests.report.measured import matches, perplexities
from tra.report import figures, save_figure
from tra.report.figures import (
    MEASURES,
    attention_heatmap,
    heatmap_values,
    measure_by_length,
    measures_by_step,
    perplexity_by_window,
    styled,
)


def drawn_cells(matrix: torch.Tensor, folder: Path) -> numpy.ndarray:
    """The colour in the middle of each cell of a heatmap, ``[L, L, 3]`` from 0 to 1."""
    figure = attention_heatmap({"TRA": [matrix[None]]}, ["a"] * len(matrix))
    save_figure(figure, folder / "heatmap.png")
    image = matplotlib.image.imread(folder / "heatmap.png")[..., :3]
    places = numpy.stack(numpy.meshgrid(*[numpy.arange(len(matrix))] * 2), axis=-1).reshape(-1, 2)
    dots = figure.axes[0].transData.transform(places) * 160 / figure.dpi
    colours = image[image.shape[0] - 1 - dots[:, 1].astype(int), dots[:, 0].astype(int)]
    return colours.reshape(len(matrix), len(matrix), 3)


@pytest.mark.parametrize("most_shapes", [50_000, 0], ids=["shapes", "image"])
def test_white_is_exactly_zero_and_dark_is_strong(
    most_shapes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_SHAPES", most_shapes)
    matrix = torch.tensor([[1.0, 0, 0, 0], [0, 1e-30, 0, 0], [1e-3, 0, 1e-2, 0], [0.1, 1e-4, 0, 1.0]])
    colours = drawn_cells(matrix, tmp_path)
    white = (colours == 1.0).all(axis=-1)
    assert white.tolist() == ((matrix == 0) & torch.ones(4, 4).tril().bool()).tolist(), "nor is what comes later"
    by_strength = [colours[place].sum() for place in ((1, 1), (2, 0), (2, 2), (3, 0), (0, 0))]
    assert by_strength == sorted(by_strength, reverse=True)
    assert colours[1, 1].min() < 0.8, "the palest is not nearly white"
    assert colours[0, 0].max() < 0.3
    assert (colours[1, 1] == colours[3, 1]).all(), "what is smaller than the smallest shown looks like it"


def test_a_heatmap_is_vectors_with_a_legend_that_says_what_white_is(tmp_path: Path) -> None:
    figure = attention_heatmap({"TRA": [torch.eye(9)[None]]}, list("abcdefghi"))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["exactly 0", "after the query"]
    assert figure.axes[-1].get_ylabel() == "size of the attention weight (white: exactly 0)"
    save_figure(figure, tmp_path / "heatmap.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "heatmap.svg").getroot()
    assert not list(root.iter("{http://www.w3.org/2000/svg}image"))
    save_figure(figure, tmp_path / "heatmap.pdf")
    assert b"/Subtype /Image" not in (tmp_path / "heatmap.pdf").read_bytes()


def test_the_stronger_a_weight_the_darker_it_is() -> None:
    palette = figures.heatmap_colours()(numpy.linspace(0, 1, 64))[:, :3]
    luminance = palette @ numpy.array([0.2126, 0.7152, 0.0722])
    assert (numpy.diff(luminance) < 0).all()
    assert luminance[-1] < 0.1


def test_a_negative_weight_is_drawn_by_its_size() -> None:
    assert heatmap_values(torch.tensor([-0.5, 0.25, -1e-30])).tolist() == pytest.approx([0.5, 0.25, 1e-4])


def test_tokens_are_written_as_they_are(tmp_path: Path) -> None:
    """Dollars are no mathematics, line breaks are seen, and what the font lacks gives no warning."""
    figure = attention_heatmap({"TRA": [torch.eye(4)[None]]}, ["$$", "$x$", "\n", "河"])
    save_figure(figure, tmp_path / "heatmap.png")
    panel = figure.axes[0]
    for axis in (panel.xaxis, panel.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == ["$$", "$x$", "\\n", "河"]
        assert not any(label.get_parse_math() for label in axis.get_ticklabels())


def test_heatmap_of_one_dark_cell_is_drawn_where_it_belongs(tmp_path: Path) -> None:
    weights = torch.zeros(1, 4, 4)
    weights[0, 3, 0] = 1.0
    save_figure(attention_heatmap({"TRA": [weights]}, list("wr01")), tmp_path / "heatmap.png")
    image = matplotlib.image.imread(tmp_path / "heatmap.png")[..., :3]
    coloured = image[..., 2] - image[..., 0] > 0.12  # the darkest is a blue
    panel = coloured[:, : image.shape[1] // 2]
    rows, columns = numpy.nonzero(panel)
    assert len(rows) > 100
    assert rows.mean() > image.shape[0] * 0.6  # the last query is the bottom row
    assert columns.mean() < image.shape[1] * 0.4  # the first key is the left column


def test_measure_has_a_panel_per_set_and_a_line_per_mechanism(tmp_path: Path) -> None:
    records = [
        record
        for row, low in (("tra", 1.0), ("rope", 0.117))
        for name in ("iid", "sparse")
        for record in matches("flip_flop", row, name, {64: [1.0], 256: [low]}, trained=64, unit="bits")
    ]
    figure = measure_by_length(records, "flip_flop")
    assert isinstance(figure, Figure)
    assert [panel.get_title() for panel in figure.axes] == ["iid", "sparse"]
    for panel in figure.axes:
        assert {line.get_label(): line.get_xydata().tolist() for line in panel.lines} == {
            "tra": [[64, 1.0], [256, 1.0]],
            "rope": [[64, 1.0], [256, 0.117]],
        }
        assert panel.get_xlabel() == "bits"
        assert panel.get_ylim() == (-0.04, 1.04)
    assert figure.axes[0].get_ylabel() == "exact match"
    assert figure.get_suptitle() == "flip_flop"
    save_figure(figure, tmp_path / "accuracy.png")
    image = matplotlib.image.imread(tmp_path / "accuracy.png")
    assert image.shape[0] > 300
    assert image.std() > 0.01


def test_a_measure_that_is_no_share_has_an_axis_of_its_own() -> None:
    figure = measure_by_length(perplexities("tra", 16, None, [30.0]) + perplexities("tra", 32, None, [40.0]))
    assert figure.axes[0].get_ylabel() == "perplexity per token"
    low, high = figure.axes[0].get_ylim()
    assert 20 < low < 30
    assert 40 < high < 50


def test_several_seeds_are_drawn_as_their_mean_and_a_band_over_their_range(tmp_path: Path) -> None:
    seeds = matches("c", "tra", "iid", {64: [1.0, 1.0], 256: [0.25, 0.75]}, trained=64)
    means = matches("c", "tra", "iid", {64: [1.0], 256: [0.5]}, trained=64)
    figures = [measure_by_length(records) for records in (seeds, means)]
    lines = [figure.axes[0].lines[0] for figure in figures]
    assert [line.get_xydata().tolist() for line in lines] == [[[64.0, 1.0], [256.0, 0.5]]] * 2
    bands = [figure.axes[0].collections[0].get_paths()[0].vertices for figure in figures]
    at_256 = [set(band[band[:, 0] == 256][:, 1].tolist()) for band in bands]
    assert at_256 == [{0.25, 0.75}, {0.5}]
    for name, figure in zip(("seeds", "means"), figures, strict=True):
        save_figure(figure, tmp_path / f"{name}.png")
    images = [matplotlib.image.imread(tmp_path / f"{name}.png") for name in ("seeds", "means")]
    assert images[0].shape == images[1].shape
    assert not numpy.array_equal(*images)


PERPLEXITIES = [
    *perplexities("tra", 16, None, [30.0], losses=[5.0, 4.0, 3.5, 3.4]),
    *perplexities("tra", 16, None, [20.0], losses=[5.0, 4.0, 3.5, 3.2]),
    *perplexities("tra", 64, None, [18.0], losses=[6.0, 4.0, 3.0, 3.0, None, 2.5]),
    *perplexities("tra", 64, None, [22.0], losses=[5.0, 4.0, 3.0, 3.0, 3.0, 3.5]),
    *perplexities("tra", 64, 4, [11.0], losses=[1.0] * 6),
    *perplexities("tra", 256, 4, [10.0], losses=[1.0] * 8),
    *perplexities("rope", 16, None, [24.0], losses=[5.0, 4.0, 3.5, 3.3]),
    *perplexities("rope", 64, None, [900.0], losses=[5.0, 4.0, 3.0, 3.0, 60.0, 70.0]),
]


@pytest.fixture
def perplexity_figure() -> Figure:
    return perplexity_by_window(PERPLEXITIES)


def test_perplexity_has_a_line_per_mechanism_through_the_means_over_seeds(perplexity_figure: Figure) -> None:
    """Of windows side by side; sliding ones, and a longest window that was only slid, have no part."""
    windows, positions = perplexity_figure.axes
    assert {line.get_label(): line.get_xydata().tolist() for line in windows.lines} == {
        "tra": [[16, 25], [64, 20]],
        "rope": [[16, 24], [64, 900]],
    }
    assert {line.get_label(): line.get_xydata().tolist() for line in positions.lines} == {
        "tra": [[2, 5.5], [4, 4], [8, 3], [16, 3], [32, 3], [64, 3]],
        "rope": [[2, 5], [4, 4], [8, 3], [16, 3], [32, 60], [64, 70]],
    }
    assert [panel.get_xlabel() for panel in (windows, positions)] == [
        "window in tokens",
        "positions from half of this to this, in windows of 64",
    ]
    (legend,) = perplexity_figure.legends
    assert [entry.get_text() for entry in legend.get_texts()] == ["tra", "rope", "trained length"]


def test_perplexity_has_a_band_over_the_range_of_seeds(perplexity_figure: Figure) -> None:
    windows, positions = perplexity_figure.axes
    bands = [collection.get_paths()[0].vertices for collection in windows.collections]
    ranges = [{place: set(band[band[:, 0] == place][:, 1].tolist()) for place in (16, 64)} for band in bands]
    assert ranges == [{16: {20.0, 30.0}, 64: {18.0, 22.0}}, {16: {24.0}, 64: {900.0}}]
    band = positions.collections[0].get_paths()[0].vertices
    assert set(band[band[:, 0] == 64][:, 1].tolist()) == {2.5, 3.5}


def test_the_trained_range_is_shaded_in_both_panels(perplexity_figure: Figure) -> None:
    for panel, first in zip(perplexity_figure.axes, (16, 2), strict=True):
        (shade,) = panel.patches
        left, right = shade.get_x(), shade.get_x() + shade.get_width()
        assert right == 16
        assert left == pytest.approx(first / 1.3)
        assert panel.get_xlim()[0] == pytest.approx(left)
        assert shade.get_facecolor() == matplotlib.colors.to_rgba("0.92")


def test_a_mechanism_that_breaks_down_does_not_press_the_others_together(perplexity_figure: Figure) -> None:
    windows, positions = perplexity_figure.axes
    assert windows.get_ylim() == pytest.approx((0.95 * 18, 2.5 * 18))
    assert positions.get_ylim() == pytest.approx((0.95 * 2.5, 2.0 * 2.5))


LINES = matches("c", "tra", "iid", {8: [1.0], 16: [0.5]}) + matches("c", "rope", "iid", {8: [1.0], 16: [0.25]})


def test_a_figure_is_saved_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    figure = measure_by_length(LINES)
    for kind in ("png", "svg", "pdf"):
        save_figure(figure, tmp_path / f"figure.{kind}")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert xml.etree.ElementTree.parse(tmp_path / "figure.svg").getroot().tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.pdf", "figure.png", "figure.svg"]


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_figure_is_saved_whole_or_not_at_all(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"figure.{kind}"
    path.write_bytes(b"the one before")
    figure = measure_by_length(LINES)
    with full_disk(1000), pytest.raises(OSError, match=f"figure.{kind}"):
        save_figure(figure, path)
    assert path.read_bytes() == b"the one before"
    assert list(tmp_path.iterdir()) == [path]


def colours_of(figure: Figure) -> list[str]:
    return [matplotlib.colors.to_hex(line.get_color()) for line in figure.axes[0].lines]


def test_colours_and_resolution_are_those_of_the_style(tmp_path: Path) -> None:
    sheet = tmp_path / "mine.mplstyle"
    sheet.write_text("axes.prop_cycle: cycler('color', ['aa0000', '00bb00', '0000cc'])\nsavefig.dpi: 50\n")
    with styled(str(sheet)):
        own = measure_by_length(LINES)
        save_figure(own, tmp_path / "own.png")
    usual = measure_by_length(LINES)
    save_figure(usual, tmp_path / "usual.png")
    assert colours_of(own) == ["#aa0000", "#00bb00"]
    assert colours_of(usual) == ["#1f77b4", "#ff7f0e"]
    heights = [matplotlib.image.imread(tmp_path / f"{name}.png").shape[0] for name in ("own", "usual")]
    assert heights == [220, 704]  # of 4.4 inches
    with styled("ggplot"):
        assert colours_of(measure_by_length(LINES)) == ["#e24a33", "#348abd"]


def test_more_mechanisms_than_can_be_told_apart_have_a_panel_each(tmp_path: Path) -> None:
    """With a line for each set in it, and those of all mechanisms in grey behind them."""
    records = [
        record
        for row in range(14)
        for name in ("iid", "dense")
        for record in matches("c", f"row {row}", name, {8: [1.0, 1.0], 16: [0.05 * row, 0.01 * row]})
    ]
    figure = measure_by_length(records, "c")
    shown = [panel for panel in figure.axes if panel.axison]
    assert [panel.get_title() for panel in shown] == [f"row {row}" for row in range(14)]
    for row, panel in enumerate(shown):
        own = [line for line in panel.lines if line.get_label() in ("iid", "dense")]
        assert [line.get_xydata().tolist() for line in own] == [[[8, 1.0], [16, pytest.approx(0.03 * row)]]] * 2
        assert len(panel.lines) == 2 + 2 * 14
    save_figure(figure, tmp_path / "figure.png")
    across = 5
    numbered = [any(label.get_text() for label in panel.get_xticklabels() if label.get_visible()) for panel in shown]
    assert numbered == [place + across >= 14 for place in range(14)]  # the lowest of each column
    assert len({line.get_label() for panel in measure_by_length(records[: 8 * 8]).axes for line in panel.lines}) == 8


def test_a_style_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="style must be a style sheet of matplotlib, got 'ggplott'"), styled("ggplott"):
        pass
    with styled(None):
        assert colours_of(measure_by_length(LINES)) == ["#1f77b4", "#ff7f0e"]


def test_losses_and_validation_of_runs_lie_over_each_other() -> None:
    def logged(loss: float) -> list[dict[str, float]]:
        return [
            {"step": 1, "loss": 2.0},
            {"step": 2, "loss": loss, "validation/exact_match": 1.0, "validation/loss": 0.5},
        ]

    figure = measures_by_step([("tra", logged(0.1)), ("tra", logged(0.2)), ("rope", logged(0.9))], "flip_flop")
    assert [panel.get_ylabel() for panel in figure.axes] == ["loss", "validation/loss", "validation/exact match"]
    lines = figure.axes[0].lines
    assert [line.get_ydata().tolist() for line in lines] == [[2.0, 0.1], [2.0, 0.2], [2.0, 0.9]]
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()
    low, high = figure.axes[2].get_ylim()
    assert low < 0
    assert high > 1, "a line at 1 lies clear of the edge"


def test_every_measure_that_training_logs_has_a_panel() -> None:
    entry = dict.fromkeys(MEASURES, 0.5) | {"step": 1, "gradient_norm": 3.0}
    figure = measures_by_step([("tra", [entry])])
    shown = [panel for panel in figure.axes if panel.axison]
    assert [panel.get_ylabel() for panel in shown] == [name.replace("_", " ") for name in MEASURES]
    assert {"learning rate", "tokens per second", "validation/token accuracy"} <= {x.get_ylabel() for x in shown}


def test_lines_at_0_and_1_lie_clear_of_the_axes() -> None:
    figure = measure_by_length(matches("copy", "tra", "copy", {8: [1.0], 16: [0.0]}))
    low, high = figure.axes[0].get_ylim()
    assert low < 0 < 1 < high

"""What the figures show, read back from their pixels."""

from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import numpy
import pytest
import torch
from matplotlib.figure import Figure

from tra.figures import (
    accuracy_by_length,
    attention_heatmap,
    heatmap_colours,
    heatmap_values,
    perplexity_by_window,
)
from tra.report import exact_match_table

RESULTS = {
    name: [
        {"set": kind, "length": length, "examples": 4, "exact_match": value}
        for kind in ("iid", "sparse")
        for length, value in ((64, 1.0), (256, low))
    ]
    for name, low in (("tra", 1.0), ("rope", 0.117))
}


def test_exact_zero_is_white_and_the_smallest_weight_is_not() -> None:
    matrix = torch.tensor([[1.0, 0.0], [1e-30, 1.0]])
    values = heatmap_values(matrix)
    assert values.isnan().tolist() == [[False, True], [False, False]]
    colours = heatmap_colours()
    assert colours(numpy.ma.masked_invalid(values.numpy()))[0, 1].tolist() == [1, 1, 1, 1]
    palette = colours(numpy.linspace(0, 1, 256))[:, :3]
    assert palette.min(axis=1).max() < 0.9  # white itself is not on the scale


def test_a_negative_weight_is_drawn_by_its_size() -> None:
    assert heatmap_values(torch.tensor([-0.5, 0.25, -1e-30])).tolist() == pytest.approx([0.5, 0.25, 1e-4])


def test_tokens_are_written_as_they_are(tmp_path: Path, drawn: list[Figure]) -> None:
    """Dollars are no mathematics, line breaks are seen, and what the font lacks gives no warning."""
    attention_heatmap({"TRA": [torch.eye(4)[None]]}, ["$$", "$x$", "\n", "河"], tmp_path / "heatmap.png")
    panel = drawn[0].axes[0]
    for axis in (panel.xaxis, panel.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == ["$$", "$x$", "\\n", "河"]
        assert not any(label.get_parse_math() for label in axis.get_ticklabels())


def test_heatmap_of_one_dark_cell_is_drawn_where_it_belongs(tmp_path: Path) -> None:
    weights = torch.zeros(1, 4, 4)
    weights[0, 3, 0] = 1.0
    attention_heatmap({"TRA": [weights]}, list("wr01"), tmp_path / "heatmap.png")
    image = matplotlib.image.imread(tmp_path / "heatmap.png")[..., :3]
    coloured = (image.max(axis=2) - image.min(axis=2)) > 0.3
    panel = coloured[:, : image.shape[1] // 2]
    rows, columns = numpy.nonzero(panel)
    assert len(rows) > 100
    assert rows.mean() > image.shape[0] * 0.6  # the last query is the bottom row
    assert columns.mean() < image.shape[1] * 0.4  # the first key is the left column


def test_accuracy_figure_is_written(tmp_path: Path) -> None:
    accuracy_by_length(RESULTS, trained=64, path=tmp_path / "accuracy.png")
    image = matplotlib.image.imread(tmp_path / "accuracy.png")
    assert image.shape[0] > 300
    assert image.std() > 0.01


def test_table_has_a_row_per_mechanism_and_set_and_a_column_per_length() -> None:
    assert exact_match_table(RESULTS) == (
        "| attention | set | 64 | 256 |\n"
        "|---|---|---:|---:|\n"
        "| tra | iid | 1.000 | 1.000 |\n"
        "| tra | sparse | 1.000 | 1.000 |\n"
        "| rope | iid | 1.000 | 0.117 |\n"
        "| rope | sparse | 1.000 | 0.117 |\n"
    )


def measured(length: int, perplexity: float, losses: list[float | None], stride: int | None = None) -> dict[str, Any]:
    return {"length": length, "perplexity": perplexity, "loss_by_position": losses, "stride": stride}


PERPLEXITIES = {
    "tra": [
        measured(16, 30.0, [5.0, 4.0, 3.5, 3.4]),
        measured(16, 20.0, [5.0, 4.0, 3.5, 3.2]),
        measured(64, 18.0, [6.0, 4.0, 3.0, 3.0, None, 2.5]),
        measured(64, 22.0, [5.0, 4.0, 3.0, 3.0, 3.0, 3.5]),
        measured(64, 11.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], stride=4),
        measured(256, 10.0, [1.0] * 8, stride=4),
    ],
    "rope": [measured(16, 24.0, [5.0, 4.0, 3.5, 3.3]), measured(64, 900.0, [5.0, 4.0, 3.0, 3.0, 60.0, 70.0])],
}


@pytest.fixture
def perplexity_figure(tmp_path: Path, drawn: list[Figure]) -> Figure:
    perplexity_by_window(PERPLEXITIES, 16, tmp_path / "perplexity.png")
    assert matplotlib.image.imread(tmp_path / "perplexity.png").std() > 0.01
    (figure,) = drawn
    return figure


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

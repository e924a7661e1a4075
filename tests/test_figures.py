"""What the figures show, read back from their pixels."""

from pathlib import Path

import matplotlib.image
import numpy
import torch

from tra.figures import accuracy_by_length, attention_heatmap, heatmap_colours, heatmap_values
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

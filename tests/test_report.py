"""Tables and bands over several seeds, against numbers worked out by hand."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy
from matplotlib.figure import Figure

from tra.figures import accuracy_by_length
from tra.report import comparison_csv, comparison_tables, perplexity_tables, results_table, spread


def runs(column: str, attention: str, name: str, measured: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
    """Rows of one mechanism: for each length the exact match of seeds 0, 1, ..."""
    rows = []
    for length, values in measured.items():
        for seed, value in enumerate(values):
            where = {"column": column, "attention": attention, "seed": seed}
            rows.append({**where, "set": name, "length": length, "exact_match": value})
    return rows


# Trained at 8. The mean over 16 and 32 is the same for both seeds of "a", though each of its cells varies.
COPY = [
    *runs("copy_unique", "a", "copy", {8: [1.0, 1.0], 16: [1.0, 0.0], 32: [0.0, 1.0]}),
    *runs("copy_unique", "b", "copy", {8: [1.0, 0.5], 16: [0.25, 0.75], 32: [0.25, 0.75]}),
    *runs("copy_unique", "c", "copy", {8: [1.0, 1.0], 16: [0.0, 0.0]}),
]


def test_mean_and_sample_deviation_over_seeds_with_every_best_mean_bold() -> None:
    """Deviations of (0.25, 0.75), (0.5, 1) and (0, 1) are 1 / sqrt 8, 1 / sqrt 8 and 1 / sqrt 2."""
    assert comparison_tables(COPY, {"copy_unique": 8}) == (
        "## Past the training length\n"
        "\n"
        "Mean over the longer lengths.\n"
        "\n"
        "| attention | copy_unique |\n"
        "|---|---:|\n"
        "| a | **0.50 ± 0.00** |\n"
        "| b | **0.50 ± 0.35** |\n"
        "| c | 0.00 ± 0.00 |\n"
        "\n"
        "## Within the training length\n"
        "\n"
        "| attention | copy_unique |\n"
        "|---|---:|\n"
        "| a | **1.00 ± 0.00** |\n"
        "| b | 0.75 ± 0.35 |\n"
        "| c | **1.00 ± 0.00** |\n"
        "\n"
        "## copy_unique\n"
        "\n"
        "Trained at up to 8.\n"
        "\n"
        "| attention | copy 8 | copy 16 | copy 32 |\n"
        "|---|---:|---:|---:|\n"
        "| a | **1.00 ± 0.00** | **0.50 ± 0.71** | **0.50 ± 0.71** |\n"
        "| b | 0.75 ± 0.35 | **0.50 ± 0.35** | **0.50 ± 0.35** |\n"
        "| c | **1.00 ± 0.00** | 0.00 ± 0.00 |  |\n"
    )


def test_csv_has_a_line_per_column_set_length_and_mechanism() -> None:
    text = comparison_csv(COPY[6:] + runs("flip_flop", "a", "iid", {64: [0.5, 1.0, 0.75]}))
    assert text == (
        "task,set,length,attention,seeds,mean,deviation\n"
        "copy_unique,copy,8,b,2,0.750000,0.353553\n"
        "copy_unique,copy,16,b,2,0.500000,0.353553\n"
        "copy_unique,copy,32,b,2,0.500000,0.353553\n"
        "copy_unique,copy,8,c,2,1.000000,0.000000\n"
        "copy_unique,copy,16,c,2,0.000000,0.000000\n"
        "flip_flop,iid,64,a,3,0.750000,0.250000\n"
    )


def test_spread_of_one_value_is_zero() -> None:
    assert spread([0.3]) == (0.3, 0.0)
    assert spread([1.0, 2.0, 3.0]) == (2.0, 1.0)


def test_nothing_is_bold_where_every_mean_is_zero() -> None:
    rows = [row for attention in "ab" for row in runs("induct", attention, "induct", {8: [0.0, 0.0], 16: [0.0, 0.0]})]
    assert "**" not in comparison_tables(rows, {"induct": 8})


def test_a_single_seed_has_no_deviation() -> None:
    rows = runs("flip_flop", "a", "iid", {64: [1.0], 256: [0.5]}) + runs("flip_flop", "b", "iid", {64: [0.25]})
    table = comparison_tables(rows, {"flip_flop": 64})
    assert "±" not in table
    assert "| attention | flip_flop iid |" in table
    assert "| attention | iid 64 | iid 256 |\n|---|---:|---:|\n| a | **1.00** | **0.50** |\n| b | 0.25 |  |\n" in table


def test_a_single_seed_among_mechanisms_with_more_has_no_deviation_either() -> None:
    """A grid that is not finished: nothing is known yet of how runs of "b" differ, least of all that they do not."""
    rows = runs("flip_flop", "a", "iid", {64: [1.0, 0.5]}) + runs("flip_flop", "b", "iid", {64: [0.25]})
    table = comparison_tables(rows, {"flip_flop": 64})
    assert "| a | **0.75 ± 0.35** |\n| b | 0.25 |\n" in table


def test_the_set_of_all_stands_for_its_parts_but_only_in_its_own_column() -> None:
    rows = [
        *runs("instructed", "a", "all", {8: [0.5], 16: [0.25]}),
        *runs("instructed", "a", "copy", {8: [1.0], 16: [1.0]}),
        *runs("instructed", "a", "drop", {8: [0.0], 16: [0.0]}),
        *runs("flip_flop", "a", "iid", {8: [1.0], 16: [0.75]}),
        *runs("flip_flop", "a", "dense", {8: [1.0], 16: [0.125]}),
    ]
    past, within, *columns = comparison_tables(rows, {"instructed": 8, "flip_flop": 8}).split("## ")[1:]
    heading = "| attention | instructed | flip_flop iid | flip_flop dense |\n|---|---:|---:|---:|\n"
    assert heading + "| a | 0.25 | 0.75 | 0.12 |\n" in past
    assert heading + "| a | 0.50 | 1.00 | 1.00 |\n" in within
    assert "| all 8 | all 16 | copy 8 | copy 16 | drop 8 | drop 16 |" in columns[0]
    assert "| 0.50 | 0.25 | 1.00 | 1.00 | 0.00 | 0.00 |" in columns[0]


def test_a_column_without_longer_lengths_is_only_in_the_table_within() -> None:
    rows = runs("flip_flop", "a", "iid", {512: [1.0]})
    assert "Past the training length" not in comparison_tables(rows, {"flip_flop": 512})
    both = comparison_tables(rows + COPY, {"flip_flop": 512, "copy_unique": 8})
    assert "flip_flop" not in both[: both.index("## Within")]
    assert "Trained at up to 512." in both


def test_several_seeds_are_drawn_as_their_mean_and_a_band_over_their_range(tmp_path: Path, drawn: list[Figure]) -> None:
    seeds = runs("c", "tra", "iid", {64: [1.0, 1.0], 256: [0.25, 0.75]})
    means = runs("c", "tra", "iid", {64: [1.0], 256: [0.5]})
    for name, rows in (("seeds", seeds), ("means", means)):
        accuracy_by_length({"tra": rows}, trained=64, path=tmp_path / f"{name}.png")
    lines = [figure.axes[0].lines[0] for figure in drawn]
    assert [line.get_xydata().tolist() for line in lines] == [[[64.0, 1.0], [256.0, 0.5]]] * 2
    bands = [figure.axes[0].collections[0].get_paths()[0].vertices for figure in drawn]
    at_256 = [set(band[band[:, 0] == 256][:, 1].tolist()) for band in bands]
    assert at_256 == [{0.25, 0.75}, {0.5}]
    images = [matplotlib.image.imread(tmp_path / f"{name}.png") for name in ("seeds", "means")]
    assert images[0].shape == images[1].shape
    assert not numpy.array_equal(*images)


def read(
    attention: str, length: int, stride: int | None, by_seed: Sequence[float], name: str = "valid"
) -> list[dict[str, Any]]:
    """Rows of a mechanism in one window, from the perplexity per token of each seed: 3 tokens a word, 2 bytes each."""
    return [
        {
            "column": "wikitext103",
            "attention": attention,
            "seed": seed,
            "set": name,
            "length": length,
            "stride": stride,
            "perplexity": value,
            "perplexity_per_word": value**3,
            "perplexity_per_byte": value**0.5,
        }
        for seed, value in enumerate(by_seed)
    ]


READINGS = [
    *read("tra", 128, None, [4.0, 9.0]),
    *read("tra", 2048, None, [4.0, 4.0]),
    *read("tra", 2048, 64, [2.25, 2.25]),
    *read("rope", 128, None, [4.0, 4.0]),
    *read("rope", 2048, None, [16.0, 64.0]),
    *read("rope", 2048, 64, [2.25, 4.0]),
    *read("nope", 128, None, [4.00001]),
]


def test_perplexities_have_their_lowest_mean_bold_and_the_deviation_over_seeds() -> None:
    """Of two values the deviation is their difference / sqrt 2: 5 / sqrt 2, 48 / sqrt 2, and so on."""
    assert perplexity_tables(READINGS) == (
        "## Perplexity per token, valid, windows side by side\n"
        "\n"
        "| attention | 128 | 2,048 |\n"
        "|---|---:|---:|\n"
        "| tra | 6.50 ± 3.54 | **4.00 ± 0.00** |\n"
        "| rope | **4.00 ± 0.00** | 40.00 ± 33.94 |\n"
        "| nope | **4.00** |  |\n"
        "\n"
        "## Perplexity per token, valid, sliding windows\n"
        "\n"
        "| attention | 2,048 by 64 |\n"
        "|---|---:|\n"
        "| tra | **2.25 ± 0.00** |\n"
        "| rope | 3.12 ± 1.24 |\n"
        "\n"
        "## Perplexity per word, valid, windows side by side\n"
        "\n"
        "| attention | 128 | 2,048 |\n"
        "|---|---:|---:|\n"
        "| tra | 396.50 ± 470.23 | **64.00 ± 0.00** |\n"
        "| rope | **64.00 ± 0.00** | 1.331e+05 ± 1.825e+05 |\n"
        "| nope | 64.00 |  |\n"
        "\n"
        "## Perplexity per word, valid, sliding windows\n"
        "\n"
        "| attention | 2,048 by 64 |\n"
        "|---|---:|\n"
        "| tra | **11.39 ± 0.00** |\n"
        "| rope | 37.70 ± 37.20 |\n"
        "\n"
        "## Perplexity per byte, valid, windows side by side\n"
        "\n"
        "| attention | 128 | 2,048 |\n"
        "|---|---:|---:|\n"
        "| tra | 2.500 ± 0.707 | **2.000 ± 0.000** |\n"
        "| rope | **2.000 ± 0.000** | 6.000 ± 2.828 |\n"
        "| nope | **2.000** |  |\n"
        "\n"
        "## Perplexity per byte, valid, sliding windows\n"
        "\n"
        "| attention | 2,048 by 64 |\n"
        "|---|---:|\n"
        "| tra | **1.500 ± 0.000** |\n"
        "| rope | 1.750 ± 0.354 |\n"
    )


def test_every_set_of_a_text_has_tables_of_its_own() -> None:
    tables = perplexity_tables(read("tra", 16, None, [4.0]) + read("tra", 16, None, [9.0], "test"))
    per_token = "| attention | 16 |\n|---|---:|\n| tra | {} |\n"
    assert "## Perplexity per token, valid, windows side by side\n\n" + per_token.format("4.00") in tables
    assert "## Perplexity per token, test, windows side by side\n\n" + per_token.format("9.00") in tables
    assert tables.count("##") == 6
    assert "sliding" not in tables


def test_a_run_is_shown_by_what_it_measured() -> None:
    """Without the column and the seed, which only a grid knows; alone, nothing is the best."""
    rows = [{key: row[key] for key in row if key not in ("column", "attention", "seed")} for row in READINGS[2:5]]
    shown = results_table("fot", rows)
    assert "## Perplexity per token, valid, windows side by side\n\n| attention | 2,048 |\n|---|---:|\n" in shown
    assert "| fot | 2.25 |" in shown
    matches = [{"set": "iid", "length": 64, "exact_match": 0.5}]
    assert results_table("fot", matches) == "| attention | set | 64 |\n|---|---|---:|\n| fot | iid | 0.500 |\n"


def test_csv_of_perplexity_says_the_stride() -> None:
    assert comparison_csv(READINGS, "perplexity") == (
        "task,set,length,attention,seeds,mean,deviation\n"
        "wikitext103,valid,128,tra,2,6.500000,3.535534\n"
        "wikitext103,valid,2048,tra,2,4.000000,0.000000\n"
        "wikitext103,valid (stride 64),2048,tra,2,2.250000,0.000000\n"
        "wikitext103,valid,128,rope,2,4.000000,0.000000\n"
        "wikitext103,valid,2048,rope,2,40.000000,33.941125\n"
        "wikitext103,valid (stride 64),2048,rope,2,3.125000,1.237437\n"
        "wikitext103,valid,128,nope,1,4.000010,\n"
    )


def test_an_infinite_perplexity_is_shown_and_never_best() -> None:
    rows = read("tra", 16, None, [math.inf, 4.0]) + read("rope", 16, None, [9.0, 9.0])
    assert "| tra | inf ± nan |\n| rope | **9.00 ± 0.00** |\n" in perplexity_tables(rows)
    assert "wikitext103,valid,16,tra,2,inf,nan\n" in comparison_csv(rows, "perplexity")

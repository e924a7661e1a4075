"""Tables over several seeds, against numbers worked out by hand."""

import csv
import io
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report.measured import marked, matches, perplexities, stretches
from tra.report import Record, Table
from tra.report.tables import (
    by_length_table,
    comparison_csv,
    comparison_tables,
    difference_table,
    latex,
    markdown,
    results_table,
)
from tra.tasks import ExactMatch

# Trained at 8. The mean over 16 and 32 is the same for both seeds of "a", though each of its cells varies.
COPY = [
    *matches("copy_unique", "a", "copy", {8: [1.0, 1.0], 16: [1.0, 0.0], 32: [0.0, 1.0]}),
    *matches("copy_unique", "b", "copy", {8: [1.0, 0.5], 16: [0.25, 0.75], 32: [0.25, 0.75]}),
    *matches("copy_unique", "c", "copy", {8: [1.0, 1.0], 16: [0.0, 0.0]}),
]


def shown(records: list[Record]) -> str:
    return markdown(comparison_tables(records))


def test_mean_and_sample_deviation_over_seeds_with_every_best_mean_bold() -> None:
    """Deviations of (0.25, 0.75), (0.5, 1) and (0, 1) are 1 / sqrt 8, 1 / sqrt 8 and 1 / sqrt 2."""
    how = "Mean ± deviation over 2 seeds; 95% interval over test sequences and seeds."
    assert shown(COPY) == (
        "## Past the training length\n"
        "\n"
        f"Mean exact match over the longer lengths. {how}\n"
        "\n"
        "| attention | copy_unique |\n"
        "|---|---:|\n"
        "| a | **0.50 ± 0.00** |\n"
        "| b | **0.50 ± 0.35** |\n"
        "| c | 0.00 ± 0.00 |\n"
        "| test sequences |  |\n"
        "\n"
        "## Within the training length\n"
        "\n"
        f"Mean exact match. {how}\n"
        "\n"
        "| attention | copy_unique |\n"
        "|---|---:|\n"
        "| a | **1.00 ± 0.00** |\n"
        "| b | 0.75 ± 0.35 |\n"
        "| c | **1.00 ± 0.00** |\n"
        "| test sequences |  |\n"
        "\n"
        "## copy_unique\n"
        "\n"
        f"Trained at up to 8 tokens. {how}\n"
        "\n"
        "| attention | copy 8 | copy 16 | copy 32 |\n"
        "|---|---:|---:|---:|\n"
        "| a | **1.00 ± 0.00** | **0.50 ± 0.71** | **0.50 ± 0.71** |\n"
        "| b | 0.75 ± 0.35 | **0.50 ± 0.35** | **0.50 ± 0.35** |\n"
        "| c | **1.00 ± 0.00** | 0.00 ± 0.00 |  |\n"
        "| test sequences |  |  |  |\n"
    )


def test_every_table_says_how_many_sequences_each_column_rests_on() -> None:
    records = [
        *matches("copy", "a", "copy", {8: [1.0, 1.0], 16: [0.5, 0.5], 32: [0.5, 0.5]}, examples=1200),
        *matches("copy", "b", "copy", {8: [0.9], 16: [0.5], 32: [0.0]}, examples=1200),
    ]
    past, within, column = comparison_tables(records)
    assert list(past.rows[-1]) == ["test sequences", "2,400"], "of both lengths, once for all seeds"
    assert list(within.rows[-1]) == ["test sequences", "1,200"]
    assert list(column.rows[-1]) == ["test sequences", "1,200", "1,200", "1,200"]
    for table in comparison_tables(perplexities("tra", 16, None, [4.0], windows=7)):
        assert list(table.rows[-1]) == ["test sequences", "7"]
    text = results_table("fot", [marked([True, False], 8), marked([True] * 3, 16)], "tokens")
    assert text.splitlines()[-1] == "| test sequences |  | 2 | 3 |"


def test_intervals_stand_beside_mean_and_deviation() -> None:
    """Of 4 sequences of which all are right the exact binomial interval begins at 0.025^(1/4) = 0.398."""
    records = matches("c", "a", "c", {8: [1.0, 1.0]}, examples=4)
    assert "| a | 1.00 ± 0.00 [0.40, 1.00] |\n" in shown(records)
    one = matches("c", "a", "c", {8: [0.5]}, examples=100)
    cell = re.search(r"\| a \| 0\.50 \[(\d\.\d\d), (\d\.\d\d)\] \|\n", shown(one))
    assert cell is not None
    assert [float(bound) for bound in cell.groups()] == pytest.approx([0.40, 0.60], abs=0.02)
    assert "One seed; 95% interval over test sequences.\n" in shown(one)


def test_token_accuracy_stands_beside_exact_match_where_that_is_the_same_for_everybody() -> None:
    """0 for both at 32; at 16 one has something; at 8 both are perfect, to two digits."""
    found = {
        "a": {8: (1.0, 1.0), 16: (0.5, 0.9), 32: (0.0, 0.75)},
        "b": {8: (0.998, 0.99), 16: (0.0, 0.5), 32: (0.004, 0.5)},
    }
    records = [
        Record("copy", row, 0, 8, "symbols", ExactMatch("copy", length, 4, None, 0.1, None, exact, tokens))
        for row, lengths in found.items()
        for length, (exact, tokens) in lengths.items()
    ]
    (table,) = (table for table in comparison_tables(records) if table.title == "copy, token accuracy")
    assert table.headings == ["attention", "copy 8", "copy 32"]
    assert table.rows[:2] == [["a", "1.00", "0.75"], ["b", "0.99", "0.50"]]
    assert table.note.endswith("or 1 for all. One seed.")
    alone = [record for record in records if record.row == "a"]
    assert all("token" not in table.title for table in comparison_tables(alone)), "one row is no comparison"


def test_nothing_is_bold_where_every_mean_is_zero() -> None:
    records = [record for row in "ab" for record in matches("induct", row, "induct", {8: [0.0, 0.0], 16: [0.0, 0.0]})]
    assert "**" not in shown(records)


def test_a_single_seed_has_no_deviation() -> None:
    records = [
        *matches("flip_flop", "a", "iid", {64: [1.0], 256: [0.5]}, trained=64),
        *matches("flip_flop", "b", "iid", {64: [0.25]}, trained=64),
    ]
    table = shown(records)
    assert "±" not in table
    assert "| attention | flip_flop iid |" in table
    assert "| attention | iid 64 | iid 256 |\n|---|---:|---:|\n| a | **1.00** | **0.50** |\n| b | 0.25 |  |\n" in table


def test_a_single_seed_among_mechanisms_with_more_has_no_deviation_either() -> None:
    """A grid that is not finished: nothing is known yet of how runs of "b" differ, least of all that they do not."""
    records = [
        *matches("flip_flop", "a", "iid", {64: [1.0, 0.5]}, trained=64),
        *matches("flip_flop", "b", "iid", {64: [0.25]}, trained=64),
    ]
    assert "| a | **0.75 ± 0.35** |\n| b | 0.25 |\n" in shown(records)
    assert "over 1 to 2 seeds" in shown(records)


def test_the_set_of_all_stands_for_its_parts_but_only_in_its_own_column() -> None:
    records = [
        *matches("instructed", "a", "all", {8: [0.5], 16: [0.25]}),
        *matches("instructed", "a", "copy", {8: [1.0], 16: [1.0]}),
        *matches("instructed", "a", "drop", {8: [0.0], 16: [0.0]}),
        *matches("flip_flop", "a", "iid", {8: [1.0], 16: [0.75]}),
        *matches("flip_flop", "a", "dense", {8: [1.0], 16: [0.125]}),
    ]
    past, within, *columns = shown(records).split("## ")[1:]
    heading = "| attention | instructed | flip_flop iid | flip_flop dense |\n|---|---:|---:|---:|\n"
    assert heading + "| a | 0.25 | 0.75 | 0.12 |\n" in past
    assert heading + "| a | 0.50 | 1.00 | 1.00 |\n" in within
    assert "| all 8 | all 16 | copy 8 | copy 16 | drop 8 | drop 16 |" in columns[0]
    assert "| 0.50 | 0.25 | 1.00 | 1.00 | 0.00 | 0.00 |" in columns[0]


def test_a_column_without_longer_lengths_is_only_in_the_table_within() -> None:
    records = matches("flip_flop", "a", "iid", {512: [1.0]}, trained=512)
    assert "Past the training length" not in shown(records)
    both = shown(records + COPY)
    assert "flip_flop" not in both[: both.index("## Within")]
    assert "Trained at up to 512 tokens." in both


def test_rows_that_were_not_tuned_are_marked() -> None:
    tuned, other = matches("c", "tra", "c", {8: [1.0]}), matches("c", "mine", "c", {8: [0.5]}, tuned=False)
    for table in comparison_tables(tuned + other):
        assert [row[0] for row in table.rows] == ["tra", "mine†", "test sequences"]
        assert " †: not tuned. " in table.note
    (_, table) = comparison_tables(other)
    assert table.rows[0][0] == "mine"
    assert " No mechanism was tuned. " in table.note
    assert all("tuned" not in table.note for table in comparison_tables(tuned))


READINGS = [
    *perplexities("tra", 128, None, [4.0, 9.0]),
    *perplexities("tra", 2048, None, [4.0, 4.0]),
    *perplexities("tra", 2048, 64, [2.25, 2.25]),
    *perplexities("rope", 128, None, [4.0, 4.0]),
    *perplexities("rope", 2048, None, [16.0, 64.0]),
    *perplexities("rope", 2048, 64, [2.25, 4.0]),
    *perplexities("nope", 128, None, [4.00001]),
]


def test_perplexities_have_their_lowest_mean_bold_and_the_deviation_over_seeds() -> None:
    """Of two values the deviation is their difference / sqrt 2: 5 / sqrt 2, 48 / sqrt 2, and so on."""
    tables = comparison_tables(READINGS)
    assert [table.title for table in tables] == [
        f"Perplexity per {unit}, valid, {how}"
        for unit in ("token", "word", "byte")
        for how in ("windows side by side", "sliding windows")
    ]
    bodies = [table.markdown().split("\n\n")[2] for table in tables]
    assert bodies == [
        "| attention | 128 | 2,048 |\n"
        "|---|---:|---:|\n"
        "| tra | 6.50 ± 3.54 | **4.00 ± 0.00** |\n"
        "| rope | **4.00 ± 0.00** | 40.00 ± 33.94 |\n"
        "| nope | **4.00** |  |\n"
        "| test sequences | 7 | 7 |\n",
        "| attention | 2,048 by 64 |\n"
        "|---|---:|\n"
        "| tra | **2.25 ± 0.00** |\n"
        "| rope | 3.12 ± 1.24 |\n"
        "| test sequences | 7 |\n",
        "| attention | 128 | 2,048 |\n"
        "|---|---:|---:|\n"
        "| tra | 396.50 ± 470.23 | **64.00 ± 0.00** |\n"
        "| rope | **64.00 ± 0.00** | 1.331e+05 ± 1.825e+05 |\n"
        "| nope | 64.00 |  |\n"
        "| test sequences | 7 | 7 |\n",
        "| attention | 2,048 by 64 |\n"
        "|---|---:|\n"
        "| tra | **11.39 ± 0.00** |\n"
        "| rope | 37.70 ± 37.20 |\n"
        "| test sequences | 7 |\n",
        "| attention | 128 | 2,048 |\n"
        "|---|---:|---:|\n"
        "| tra | 2.500 ± 0.707 | **2.000 ± 0.000** |\n"
        "| rope | **2.000 ± 0.000** | 6.000 ± 2.828 |\n"
        "| nope | **2.000** |  |\n"
        "| test sequences | 7 | 7 |\n",
        "| attention | 2,048 by 64 |\n"
        "|---|---:|\n"
        "| tra | **1.500 ± 0.000** |\n"
        "| rope | 1.750 ± 0.354 |\n"
        "| test sequences | 7 |\n",
    ]


def test_every_set_and_every_text_has_tables_of_its_own() -> None:
    tables = comparison_tables(
        [
            *perplexities("tra", 16, None, [4.0]),
            *perplexities("tra", 16, None, [9.0], "test"),
            *perplexities("tra", 16, None, [16.0], column="news"),
        ]
    )
    per_token = [(table.title, table.rows[0][1]) for table in tables if "per token" in table.title]
    assert [value for _, value in per_token] == ["4.00", "9.00", "16.00"]
    assert [title.split(", ")[1:3] for title, _ in per_token] == [
        ["wikitext103", "valid"],
        ["wikitext103", "test"],
        ["news", "valid"],
    ]
    assert "sliding" not in markdown(tables)


def test_a_run_is_shown_by_what_it_measured() -> None:
    """Alone, nothing is the best, and nobody asks how it was tuned."""
    text = results_table("fot", [record.result for record in READINGS[2:5:2]], "tokens")
    assert (
        "## Perplexity per token, valid, windows side by side\n\n| attention | 2,048 |\n|---|---:|\n| fot | 4.00 |\n"
        in text
    )
    assert (
        "## Perplexity per token, valid, sliding windows\n\n| attention | 2,048 by 64 |\n|---|---:|\n| fot | 2.25 |\n"
        in text
    )
    assert "**" not in text
    matched = [record.result for record in matches("", "", "iid", {64: [0.5]})]
    assert results_table("fot", matched, "tokens") == (
        "| attention | set | 64 |\n|---|---|---:|\n| fot | iid | 0.500 |\n| test sequences |  |  |\n"
    )


def test_table_by_length_has_a_row_per_mechanism_and_set_and_marks_the_best_of_each() -> None:
    records = [
        record
        for row, kind, low in (
            ("tra", "iid", 1.0),
            ("tra", "sparse", 0.117),
            ("rope", "iid", 0.117),
            ("rope", "sparse", 1.0),
        )
        for record in matches("flip_flop", row, kind, {64: [1.0], 1256: [low]})
    ]
    assert by_length_table(records).markdown() == (
        "| attention | set | 64 | 1,256 |\n"
        "|---|---|---:|---:|\n"
        "| tra | iid | **1.000** | **1.000** |\n"
        "| tra | sparse | **1.000** | 0.117 |\n"
        "| rope | iid | **1.000** | 0.117 |\n"
        "| rope | sparse | **1.000** | **1.000** |\n"
        "| test sequences | all sets |  |  |\n"
    )
    counted = by_length_table(
        matches("c", "a", "x", {8: [1.0]}, examples=5) + matches("c", "a", "y", {8: [1.0]}, examples=6)
    )
    assert list(counted.rows[-1]) == ["test sequences", "all sets", "11"]


def test_an_infinite_perplexity_is_shown_and_never_best() -> None:
    records = perplexities("tra", 16, None, [math.inf, 4.0]) + perplexities("rope", 16, None, [9.0, 9.0])
    assert "| tra | inf ± nan |\n| rope | **9.00 ± 0.00** |\n" in shown(records)
    assert "wikitext103,valid,16,tra,perplexity,2,7,inf,nan,,\n" in comparison_csv(records)


def test_what_is_not_a_number_is_never_best() -> None:
    records = perplexities("tra", 16, None, [math.nan]) + perplexities("rope", 16, None, [9.0])
    assert "| tra | nan |\n| rope | **9.00** |\n" in shown(records)


def test_csv_has_a_line_per_column_set_length_mechanism_and_figure() -> None:
    head = "task,set,length,attention,measure,seeds,sequences,mean,deviation,low,high\n"
    text = comparison_csv(COPY[6:] + matches("flip_flop", "a", "iid", {64: [0.5, 1.0, 0.75]}))
    assert text == head + (
        "copy_unique,copy,8,b,exact_match,2,,0.750000,0.353553,,\n"
        "copy_unique,copy,16,b,exact_match,2,,0.500000,0.353553,,\n"
        "copy_unique,copy,32,b,exact_match,2,,0.500000,0.353553,,\n"
        "copy_unique,copy,8,c,exact_match,2,,1.000000,0.000000,,\n"
        "copy_unique,copy,16,c,exact_match,2,,0.000000,0.000000,,\n"
        "flip_flop,iid,64,a,exact_match,3,,0.750000,0.250000,,\n"
    )
    lines = list(csv.DictReader(io.StringIO(comparison_csv(READINGS))))
    per_token = [(line["set"], line["attention"], line["mean"], line["deviation"]) for line in lines[:7]]
    assert per_token == [
        ("valid", "tra", "6.500000", "3.535534"),
        ("valid", "tra", "4.000000", "0.000000"),
        ("valid (stride 64)", "tra", "2.250000", "0.000000"),
        ("valid", "rope", "4.000000", "0.000000"),
        ("valid", "rope", "40.000000", "33.941125"),
        ("valid (stride 64)", "rope", "3.125000", "1.237437"),
        ("valid", "nope", "4.000010", ""),
    ]
    assert [line["measure"] for line in lines[::7]] == ["perplexity", "perplexity_per_word", "perplexity_per_byte"]
    assert {line["sequences"] for line in lines} == {"7"}


def test_csv_has_the_interval_of_each_figure() -> None:
    text = stretches([20.0, 35.0, 28.0], [10, 12, 10], words=13, size=80)
    lines = list(csv.DictReader(io.StringIO(comparison_csv([Record("c", "a", 0, 8, "tokens", text)]))))
    assert len(lines) == 3
    for line in lines:
        assert float(line["low"]) < float(line["mean"]) < float(line["high"])
    (line,) = csv.DictReader(io.StringIO(comparison_csv(matches("c", "a", "c", {8: [1.0]}, examples=4))))
    assert (line["sequences"], line["low"], line["high"]) == ("4", f"{0.025**0.25:.6f}", "1.000000")


ODD = Table(
    ["attention_name", "50% & more", "x^2 ~ {1}"],
    [["rope theta=1e4†", "0.50 ± 0.10 [0.40, 0.60]", "<1|2>"], [r"a\b $#", "1.00", ""]],
    "A_title",
    "95% interval.",
    best=frozenset({(1, 1)}),
)


def test_latex_is_a_booktabs_table_with_every_sign_escaped() -> None:
    assert ODD.latex() == "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            r"\caption{A\_title. 95\% interval.}",
            r"\begin{tabular}{lrr}",
            r"\toprule",
            r"attention\_name & 50\% \& more & x\textasciicircum{}2 \textasciitilde{} \{1\} \\",
            r"\midrule",
            r"rope theta=1e4$\dagger$ & 0.50 $\pm$ 0.10 [0.40, 0.60] & \textless{}1\textbar{}2\textgreater{} \\",
            r"a\textbackslash{}b \$\# & \textbf{1.00} &  \\",
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


@pytest.mark.parametrize("records", [COPY, READINGS], ids=["exact match", "perplexity"])
def test_every_latex_table_is_whole(records: list[Record]) -> None:
    tables = comparison_tables(records)
    text = latex(tables)
    assert text.startswith("% needs \\usepackage{booktabs}\n")
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == len(tables)
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    widths = [len(table.headings) for table in tables for _ in range(1 + len(table.rows))]
    assert [len(re.split(r"(?<!\\)&", line)) for line in lines] == widths
    assert text.isascii()
    assert text.count(r"\textbf{") == sum(len(table.best) for table in tables) > 0


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_can_be_typeset(tmp_path: Path) -> None:
    body = latex([ODD, *comparison_tables(COPY)])
    document = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}" + body + "\\end{document}"
    (tmp_path / "table.tex").write_text(document)
    done = subprocess.run(["pdflatex", "-halt-on-error", "table.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_markdown_keeps_a_bar_inside_its_cell() -> None:
    assert Table(["a|b", "c"], [["d|e", "1"]]).markdown() == "| a\\|b | c |\n|---|---:|\n| d\\|e | 1 |\n"


def test_where_no_error_was_found_the_table_says_how_many_there_may_be() -> None:
    """Past the training length, over lengths: 100 + 50 sequences, 700 + 800 tokens, which both seeds read."""

    def flawless(row: str, last: float, tokens: int | None = 800) -> list[Record]:
        return [
            Record(
                "flip_flop", row, seed, 8, "tokens", ExactMatch("iid", length, n, None, 0.1, None, value, 1.0, reads)
            )
            for seed in range(2)
            for length, n, value, reads in ((8, 9, 0.5, 9), (16, 100, 1.0, 700), (32, 50, last, tokens))
        ]

    records = [*flawless("tra", 1.0), *flawless("rope", 0.98), *flawless("old", 1.0, tokens=None)]
    (table,) = (table for table in comparison_tables(records) if table.title == "No error found")
    ((*words, sequences, per_sequence, tokens, per_token),) = table.rows
    assert words == ["tra", "flip_flop iid", "16 to 32", "2"]
    assert (sequences, tokens) == ("150", "1,500")
    assert (1 - float(per_sequence)) ** 150 == pytest.approx(0.05, rel=0.05)
    assert (1 - float(per_token)) ** 1500 == pytest.approx(0.05, rel=0.05)
    assert not [table for table in comparison_tables(flawless("rope", 0.98)) if table.title == "No error found"]


def test_differences_are_over_the_seeds_and_stretches_that_both_have() -> None:
    def read(row: str, losses: list[float], seed: int) -> Record:
        return Record("wikitext103", row, seed, 16, "tokens", stretches(losses, [10] * len(losses), 9, 50))

    ours = [read("tra", [20.0, 21.0, 22.0, 20.5], seed) for seed in range(2)]
    theirs = [read("fot", [19.0, 20.0, 21.0, 19.5], seed) for seed in (1, 2)]
    (table,) = difference_table([*ours, *theirs], "tra", "perplexity")
    ((name, text),) = table.rows
    assert (name, list(table.headings)) == ("fot", ["attention", "16"])
    expected = math.exp(79.5 / 40) - math.exp(83.5 / 40)
    mean, low, high = map(float, re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", text).groups())  # type: ignore[union-attr]
    assert mean == pytest.approx(expected, abs=0.006)
    assert low <= mean <= high < 0
    assert difference_table(theirs, "tra", "perplexity") == difference_table(ours, "tra", "perplexity") == []

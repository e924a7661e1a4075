"""Tables: the one class for all of them, written as Markdown and LaTeX, and the comparisons made from records."""

import csv
import io
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tra.report.intervals import difference, interval, spread, unseen
from tra.report.records import Record, grouped
from tra.tasks import ExactMatch, Result

Heading = TypeVar("Heading", bound=Hashable)

UNTUNED = "†"
"""After a row whose settings were not chosen for its mechanism."""
TEST_SEQUENCES = "test sequences"
"""Begins the row that says what the others rest on."""


@dataclass(frozen=True)
class Table:
    """Headings and rows of text. The first ``words`` columns are text, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    best: frozenset[tuple[int, int]] = frozenset()
    """Row and column of what is to be bold."""
    words: int = 1

    def markdown(self) -> str:
        """Title, note and table, ending with a line break."""

        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

        rule = "|" + "---|" * self.words + "---:|" * (len(self.headings) - self.words)
        rows = [
            line(f"**{cell}**" if (y, x) in self.best else cell for x, cell in enumerate(row))
            for y, row in enumerate(self.rows)
        ]
        head = [f"## {self.title}\n"] if self.title else []
        head += [f"{self.note}\n"] if self.note else []
        return "\n".join([*head, line(self.headings), rule, *rows]) + "\n"

    def latex(self) -> str:
        """A table for the package booktabs, with the title and note as its caption."""

        def line(cells: Iterable[str]) -> str:
            return " & ".join(cells) + r" \\"

        rows = [
            line(rf"\textbf{{{_latex(cell)}}}" if (y, x) in self.best else _latex(cell) for x, cell in enumerate(row))
            for y, row in enumerate(self.rows)
        ]
        caption = " ".join(part for part in (f"{self.title}." if self.title else "", self.note) if part)
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                *([rf"\caption{{{_latex(caption)}}}"] if caption else []),
                rf"\begin{{tabular}}{{{'l' * self.words}{'r' * (len(self.headings) - self.words)}}}",
                r"\toprule",
                line(map(_latex, self.headings)),
                r"\midrule",
                *rows,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
            ]
        )


def markdown(tables: Sequence[Table]) -> str:
    return "\n".join(table.markdown() for table in tables)


def latex(tables: Sequence[Table]) -> str:
    return "% needs \\usepackage{booktabs}\n\n" + "\n\n".join(table.latex() for table in tables) + "\n"


SPECIAL = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    UNTUNED: r"$\dagger$",
}


def _latex(text: str) -> str:
    return "".join(SPECIAL.get(sign, sign) for sign in text)


def comparison_tables(records: Sequence[Record]) -> list[Table]:
    """Everything that was measured: summaries past and within the training length where the measure can be averaged
    over lengths, then column by column.

    A set called "all" stands for the others of its column in the summaries.
    """
    tables: list[Table] = []
    for measure, alike in grouped(records, lambda record: type(record.result)).items():
        if measure.averages:
            field, title = next(iter(measure.titles.items()))
            stands = [record for record in alike if stands_for_column(record, alike)]
            past = [record for record in stands if record.result.length > record.trained]
            within = [record for record in stands if record.result.length <= record.trained]
            how = f"Mean {title} over the longer lengths."
            tables += [_table(past, _column_and_set, field, "Past the training length", how)] if past else []
            tables += flawless_tables(past)
            tables += (
                [_table(within, _column_and_set, field, "Within the training length", f"Mean {title}.")]
                if within
                else []
            )
        columns = grouped(alike, lambda record: record.column)
        for column, mine in columns.items():
            tables += _column_tables(column, mine, measure, several=len(columns) > 1)
    return tables


def flawless_tables(past: Sequence[Record]) -> list[Table]:
    """Where no error was found past the training length at any length with any seed, how many there may be."""
    rows = []
    for (row, place), some in grouped(past, lambda record: (record.row, _column_and_set(record))).items():
        results = [record.result for record in some if isinstance(record.result, ExactMatch)]
        if not results or any(result.value < 1.0 or result.tokens is None for result in results):
            continue
        of_length = {result.length: result for result in results}  # of any seed: all read the same sequences
        sequences, tokens = (sum(getattr(x, name) for x in of_length.values()) for name in ("examples", "tokens"))
        lengths = sorted(of_length)
        rows.append(
            [
                row,
                place,
                f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}",
                str(len({record.seed for record in some})),
                *(text for number in (sequences, tokens) for text in (f"{number:,}", f"{unseen(number):.1e}")),
            ]
        )
    note = (
        "All lengths together, each sequence once, however many seeds read it; the one-sided 95% bound on the error "
        "rate is Clopper and Pearson's for so many independent trials, about 3 divided by their number. Tokens of a "
        "sequence share their model and their past, so that theirs is too low."
    )
    headings = (
        *("attention", "task", "lengths", "seeds", "sequences", "errors per sequence, at most"),
        *("tokens to predict", "errors per token, at most"),
    )
    return [Table(headings, rows, "No error found", note, words=3)] if rows else []


def _column_tables(column: str, records: Sequence[Record], measure: type[Result], several: bool = False) -> list[Table]:
    """One table where the measure has one figure; else one for each figure, set and kind of window, which names the
    column if there are several."""
    trained, unit = records[0].trained, records[0].unit
    about = f"Trained at up to {trained:,} {unit}."
    if len(measure.titles) == 1:
        (field,) = measure.titles
        return [_table(records, _set_and_length, field, column, about), *_token_tables(column, records)]
    kinds = grouped(records, lambda record: (record.result.set, bool(record.result.stride)))
    return [
        _table(
            mine,
            _window,
            field,
            ", ".join(
                [
                    title.capitalize(),
                    *([column] if several else []),
                    name,
                    "sliding windows" if sliding else "windows side by side",
                ]
            ),
            about,
        )
        for field, title in measure.titles.items()
        for (name, sliding), mine in kinds.items()
    ]


def _token_tables(column: str, records: Sequence[Record]) -> list[Table]:
    """Token accuracy at the lengths at which exact match tells nothing apart: where it is 0 for all, or 1."""
    if not all(isinstance(record.result, ExactMatch) for record in records):
        return []
    alike = []
    for some in grouped(records, _set_and_length).values():
        means = [mean_and_text(mine, "exact_match")[0] for mine in grouped(some, lambda record: record.row).values()]
        if len(means) > 1 and (max(means) < 0.005 or min(means) >= 0.995):
            alike += some
    if not alike:
        return []
    note = "Share of tokens that are right, at lengths at which exact match is 0 for all mechanisms, or 1 for all."
    return [_table(alike, _set_and_length, "token_accuracy", f"{column}, token accuracy", note)]


def _table(records: Sequence[Record], heading: Callable[[Record], str], field: str, title: str, note: str) -> Table:
    """A row per mechanism and a column per heading: mean, deviation over seeds and 95% interval; the best mean of each
    column, if there are several rows, is bold."""
    headings = list(grouped(records, heading))
    rows = list(grouped(records, lambda record: record.row))
    cells, best = _cells(records, heading, field)
    marked = {(y, x) for y, row in enumerate(rows) for x, name in enumerate(headings, 1) if (row, name) in best}
    untuned = {record.row for record in records if not record.tuned}
    if untuned == set(rows):
        note += " No mechanism was tuned."
    elif untuned:
        note += f" {UNTUNED}: not tuned."
    mark = UNTUNED if untuned != set(rows) else ""
    body = [
        [row + (mark if row in untuned else ""), *(cells.get((row, name), "") for name in headings)] for row in rows
    ]
    counted = _sequences(records, heading)
    return Table(
        ["attention", *headings],
        [*body, [TEST_SEQUENCES, *(counted[name] for name in headings)]],
        title,
        f"{note} {_how(records, field)}",
        frozenset(marked),
    )


def _how(records: Sequence[Record], field: str) -> str:
    with_interval = field in type(records[0].result).titles
    seeds = sorted({len({record.seed for record in some}) for some in grouped(records, lambda r: r.row).values()})
    if seeds[-1] == 1:
        return "One seed; 95% interval over test sequences." if with_interval else "One seed."
    number = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    over = "; 95% interval over test sequences and seeds" if with_interval else ""
    return f"Mean ± deviation over {number} seeds{over}."


def _cells(
    records: Sequence[Record], place: Callable[[Record], Heading], field: str, digits: int = 2
) -> tuple[dict[tuple[str, Heading], str], set[tuple[str, Heading]]]:
    """What stands in each row at each place, and where the mean is the best of its place: if there are several rows,
    and never where it is shown as 0.00."""
    found = grouped(records, lambda record: (record.row, place(record)))
    cells = {key: mean_and_text(some, field, digits) for key, some in found.items()}
    better = max if type(records[0].result).higher_is_better else min
    best: dict[Heading, float] = {}
    for (_, where), (mean, _) in cells.items():
        if not math.isnan(mean):
            best[where] = better(mean, best.get(where, mean))
    marked = {
        (row, where)
        for (row, where), (mean, _) in cells.items()
        if mean >= 0.005 and where in best and round(mean, 4) == round(best[where], 4)
    }
    several = len({row for row, _ in cells}) > 1
    return {key: text for key, (_, text) in cells.items()}, marked if several else set()


def mean_and_text(records: Sequence[Record], field: str, digits: int = 2) -> tuple[float, str]:
    """The mean over seeds of a field, and how it is written."""
    by_seed = grouped(records, lambda record: record.seed)
    # Lengths first, then seeds: the deviation is that between runs.
    mean, deviation = spread(
        [statistics.fmean(getattr(record.result, field) for record in some) for some in by_seed.values()]
    )
    style = ".4g" if mean >= 1e5 else ".3f" if field == "perplexity_per_byte" else f".{digits}f"
    text = f"{mean:{style}}" + (f" ± {deviation:{style}}" if len(by_seed) > 1 else "")
    found = interval_of(records, field) if field in type(records[0].result).titles else None
    return mean, text if found is None else f"{text} [{found[0]:{style}}, {found[1]:{style}}]"


def interval_of(records: Sequence[Record], field: str) -> tuple[float, float] | None:
    """The 95% interval of records of one row: of one place, or of several that are averaged."""
    places = grouped(records, lambda record: (record.column, record.result.set_label, record.result.length))
    return interval(
        [[record.result for record in sorted(some, key=lambda record: record.seed)] for some in places.values()], field
    )


def difference_table(records: Sequence[Record], row: str, field: str) -> list[Table]:
    """How much more the others have of a field than one mechanism, on the same sequences with the same seeds."""
    if row not in {record.row for record in records}:
        return []
    headings = list(grouped(records, _window))
    cells = grouped(records, lambda record: (record.row, _window(record)))
    body = []
    for other in grouped(records, lambda record: record.row):
        if other == row:
            continue
        texts = []
        for name in headings:
            by_seed = [{record.seed: record.result for record in cells.get((who, name), [])} for who in (row, other)]
            shared = sorted(set(by_seed[0]) & set(by_seed[1]))
            ours, theirs = ([mine[seed] for seed in shared] for mine in by_seed)
            texts.append(_difference(ours, theirs, field))
        body.append([other, *texts])
    title = type(records[0].result).titles[field]
    note = (
        f"Mean of {title} less that of {row}, over the seeds that both have, and its 95% interval over seeds and "
        "stretches of the text, which both read alike. Where it does not hold 0, the two differ."
    )
    return [Table(["attention", *headings], body, f"Difference to {row}", note)] if body else []


def _difference(ours: Sequence[Result], theirs: Sequence[Result], field: str) -> str:
    if not ours:
        return ""
    mean = statistics.fmean(getattr(result, field) for result in theirs)
    mean -= statistics.fmean(getattr(result, field) for result in ours)
    found = difference(ours, theirs, field)
    return f"{mean:+.2f}" + ("" if found is None else f" [{found[0]:+.2f}, {found[1]:+.2f}]")


def _sequences(records: Sequence[Record], heading: Callable[[Record], str]) -> dict[str, str]:
    """How many test sequences each heading rests on, for each seed."""
    shown = {}
    for name, some in grouped(records, heading).items():
        one = grouped(some, lambda record: (record.row, record.seed)).values()
        numbers = [record.result.sequences for record in next(iter(one))]
        shown[name] = "" if None in numbers else f"{sum(number or 0 for number in numbers):,}"
    return shown


def results_table(label: str, results: Sequence[Result], unit: str) -> str:
    """What one run measured, as Markdown."""
    records = [Record(label, label, 0, 0, unit, result) for result in results]
    if len(results[0].titles) > 1:
        tables = _column_tables(label, records, type(results[0]))
        return markdown([Table(table.headings, table.rows, table.title, "", table.best) for table in tables])
    return by_length_table(records).markdown()


def by_length_table(records: Sequence[Record]) -> Table:
    """A row per mechanism and set, a column per length; the best mean of each set and length is bold."""
    lengths = sorted({record.result.length for record in records})
    measure = type(records[0].result).measure
    cells, best = _cells(records, lambda record: (record.result.set_label, record.result.length), measure, digits=3)
    kinds = list(grouped(records, lambda record: (record.row, record.result.set_label)))
    rows = [[row, place, *(cells.get((row, (place, length)), "") for length in lengths)] for row, place in kinds]
    marked = {
        (y, x) for y, (row, place) in enumerate(kinds) for x, at in enumerate(lengths, 2) if (row, (place, at)) in best
    }
    counted = _sequences(records, lambda record: f"{record.result.length:,}")
    sets = len({record.result.set_label for record in records})
    headings = [f"{length:,}" for length in lengths]
    rows.append([TEST_SEQUENCES, "all sets" if sets > 1 else "", *(counted[name] for name in headings)])
    return Table(["attention", "set", *headings], rows, best=frozenset(marked), words=2)


def comparison_csv(records: Sequence[Record]) -> str:
    """A line per column, set, length, mechanism and figure of the measure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("task", "set", "length", "attention", "measure", "seeds", "sequences", "mean", "deviation", "low", "high")
    writer.writerow(names)
    for measure, alike in grouped(records, lambda record: type(record.result)).items():
        for field in measure.titles:
            for (column, place, length, row), some in grouped(
                alike, lambda record: (record.column, record.result.set_label, record.result.length, record.row)
            ).items():
                values = [getattr(record.result, field) for record in some]
                mean, deviation = spread(values)
                low, high = (f"{bound:.6f}" for bound in bounds) if (bounds := interval_of(some, field)) else ("", "")
                sequences = some[0].result.sequences
                shown = f"{deviation:.6f}" if len(values) > 1 else ""
                head = [column, place, length, row, field, len(values), "" if sequences is None else sequences]
                writer.writerow([*head, f"{mean:.6f}", shown, low, high])
    return text.getvalue()


def _column_and_set(record: Record) -> str:
    column, name = record.column, record.result.set
    return column if name == "all" or column.startswith(name) else f"{column} {name}"


def _set_and_length(record: Record) -> str:
    return f"{record.result.set} {record.result.length:,}"


def _window(record: Record) -> str:
    stride = record.result.stride
    return f"{record.result.length:,}" + (f" by {stride:,}" if stride else "")


def stands_for_column(record: Record, records: Sequence[Record]) -> bool:
    return record.result.set == "all" or not any(
        other.result.set == "all" for other in records if other.column == record.column
    )

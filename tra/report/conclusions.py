"""What comparisons say, in a sentence for each column: who is first at the greatest length, and by how much."""

from collections.abc import Sequence

from tra.report.records import Record, grouped, without_second
from tra.report.tables import interval_of, mean_and_text, stands_for_column


def conclusions(records: Sequence[Record]) -> dict[str, str]:
    """A sentence for each column."""
    return {column: _sentence(mine) for column, mine in grouped(records, lambda record: record.column).items()}


def _sentence(records: Sequence[Record]) -> str:
    measure, trained, unit = type(records[0].result), records[0].trained, records[0].unit
    side_by_side = [record for record in records if not record.result.stride] or list(records)
    longest = max(record.result.length for record in side_by_side)
    alike = [record for record in side_by_side if record.result.length == longest]
    alike = [record for record in alike if stands_for_column(record, alike)]
    title = measure.titles[measure.measure]
    sets = list(dict.fromkeys(record.result.set_label for record in alike))
    where = f"At {longest:,} {unit}, {_times(longest, trained)}"
    where += f" (mean of {', '.join(sets)}): " if len(sets) > 1 and measure.averages else ": "
    rows = grouped(alike, lambda record: record.row)
    found = {row: mean_and_text(some, measure.measure) for row, some in rows.items()}
    sign = 1.0 if measure.higher_is_better else -1.0
    ranked = sorted(found, key=lambda row: sign * found[row][0], reverse=True)
    best = found[ranked[0]][0]
    first = [row for row in ranked if round(found[row][0], 4) == round(best, 4)]
    if measure.averages and best < 0.005:
        return f"{where}no mechanism gets a whole sequence right."
    names = " and ".join([", ".join(first[:-1]), first[-1]] if len(first) > 1 else first)
    verb, shown = ("are", "first together") if len(first) > 1 else ("is", "first")
    said = f"{where}{names} {verb} {shown}, {title} {found[first[0]][1]}"
    others = ranked[len(first) :]
    if not others:
        return f"{where}{names}: {title} {found[first[0]][1]}." if len(ranked) == 1 else f"{said}."
    same = {without_second(row) for row in first}
    next_one = next((row for row in others if without_second(row) not in same), others[0])
    margin = abs(best - found[next_one][0])
    above = "above" if measure.higher_is_better else "below"
    said += f"; {margin:.2f} {above} {next_one}, {found[next_one][1]}."
    spans = [interval_of(rows[row], measure.measure) for row in (first[0], next_one)]
    if spans[0] is None or spans[1] is None:
        return said
    apart = spans[0][0] > spans[1][1] or spans[0][1] < spans[1][0]
    return f"{said} {'Their 95% intervals do not overlap.' if apart else 'Their 95% intervals overlap: not certain.'}"


def _times(length: int, trained: int) -> str:
    if length <= trained:
        return "within the training length"
    factor = length / trained
    return f"{factor:,.0f} times the training length" if factor >= 2 else "beyond the training length"

"""What a report concludes, of figures that are made up."""

import pytest

from tests.report.measured import matches, perplexities
from tra.report import Record
from tra.report.conclusions import conclusions


def said_of(records: list[Record]) -> str:
    (sentence,) = conclusions(records).values()
    return sentence


def scored(row: str, name: str = "iid", examples: int = 100, **by_length: float) -> list[Record]:
    measured = {int(length.removeprefix("at")): [value] for length, value in by_length.items()}
    return matches("flip_flop", row, name, measured, trained=64, examples=examples)


def test_who_is_first_at_the_greatest_length_by_how_much_and_how_sure() -> None:
    said = said_of(
        [
            *scored("rope", at64=1.0, at256=0.6, at4096=0.1),
            *scored("tra", at64=1.0, at256=1.0, at4096=1.0),
            *scored("fot", at64=1.0, at256=0.99, at4096=0.6),
        ]
    )
    assert said.startswith("At 4,096 tokens, 64 times the training length: tra is first, exact match 1.00 [0.96, 1.00]")
    assert "; 0.40 above fot, 0.60 [0." in said
    assert said.endswith("Their 95% intervals do not overlap.")


def test_what_is_not_certain_is_said_so() -> None:
    said = said_of([*scored("tra", examples=20, at128=0.55), *scored("rope", examples=20, at128=0.5)])
    assert said.endswith("Their 95% intervals overlap: not certain.")


def test_several_that_are_first_are_named_together() -> None:
    rows = {"tra": 1.0, "fot": 1.0, "rope": 0.03, "nope": 0.02}
    said = said_of([record for row, value in rows.items() for record in scored(row, at256=value)])
    assert "tra and fot are first together, exact match 1.00" in said
    assert "0.97 above rope" in said


def test_sets_are_averaged_and_where_all_fail_none_is_first() -> None:
    said = said_of([x for row in ("tra", "rope") for name in ("iid", "dense") for x in scored(row, name, at256=0.0)])
    assert said == (
        "At 256 tokens, 4 times the training length (mean of iid, dense): no mechanism gets a whole sequence right."
    )


def test_one_row_alone_is_not_first() -> None:
    assert said_of(scored("tra", at32=0.5)).startswith(
        "At 32 tokens, within the training length: tra: exact match 0.50 ["
    )


@pytest.mark.parametrize("rows", [("tra", "rope"), ("rope", "tra")])
def test_of_perplexity_the_lowest_is_first_and_sliding_windows_are_left_out(rows: tuple[str, str]) -> None:
    values = {"tra": 100.0, "rope": 120.0}
    said = said_of(
        [
            *(record for row in rows for record in perplexities(row, 512, None, [values[row]])),
            *(record for row in rows for record in perplexities(row, 4096, 128, [1.0])),
        ]
    )
    assert said.startswith("At 512 tokens, 32 times the training length: tra is first, perplexity per token 100.00")
    assert "20.00 below rope, 120.00" in said

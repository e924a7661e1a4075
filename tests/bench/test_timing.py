"""Medians of two sides that run in turn."""

import time

import pytest

from tra.bench import timing
from tra.bench.timing import interleaved


def test_both_sides_run_in_turn_after_one_run_that_is_not_timed() -> None:
    ran: list[str] = []
    interleaved(lambda: ran.append("ours"), lambda: ran.append("theirs"), seconds=0.0)
    assert ran == ["ours", "theirs"] * (1 + 3)


def test_work_that_takes_no_time_ends_before_the_seconds_do() -> None:
    ran = []
    began = time.perf_counter()
    interleaved(lambda: ran.append(1), lambda: None, seconds=30.0)
    assert len(ran) == 1 + 200
    assert time.perf_counter() - began < 10.0


def test_one_slow_moment_does_not_move_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    ours, theirs = iter([9.0, 2.0, 7.0, 3.0]), iter([9.0, 1.0, 0.5, 50.0])

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert interleaved(lambda: takes(next(ours)), lambda: takes(next(theirs)), seconds=1.0) == (3.0, 1.0)

"""Lines and progress: none unless asked for, plain lines where nobody watches, a live bar on a terminal."""

import io
import re
import threading
import time

import pytest
from rich.console import Console

from tra.progress import hidden, progress, say, shown


def work(total: int, start: int = 0, **numbers: float) -> None:
    with progress("digging", total, "hole", start) as update:
        for done in range(start + 1, total + 1):
            update(done, **numbers)


def test_nothing_is_shown_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    say("hello")
    work(3, depth=2.0)
    assert capfd.readouterr() == ("", "")


def test_asked_for_it_is_shown_until_the_block_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with shown():
        say("hello [bold]you[/bold] 3.5")
        with hidden():
            say("in secret")
        with pytest.raises(ValueError, match="stop"), hidden():
            raise ValueError("stop")
        say("and goodbye")
    say("too late")
    assert capsys.readouterr().out == "hello [bold]you[/bold] 3.5\nand goodbye\n"


def test_long_lines_are_not_broken_and_a_console_of_ones_own_is_used() -> None:
    console = Console(file=io.StringIO(), soft_wrap=True, width=20)
    with shown(console):
        say("word " * 30)
    assert console.file.getvalue() == "word " * 30 + "\n"


def test_where_nobody_watches_there_are_plain_lines_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with shown(), progress("digging", 8, "hole", start=2) as update:
        for done in range(3, 9):
            now += 4.0
            update(done, depth=0.123456)
        update(8, depth=1.0)  # said already
    assert capsys.readouterr().out.splitlines() == [
        "digging: hole 5/8, depth 0.1235, 0.25 holes/s, 12 s left",
        "digging: hole 8/8, depth 0.1235, 0.25 holes/s",
    ]


def test_numbers_and_speed_are_left_out_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    with shown():
        work(1)
    assert capsys.readouterr().out == "digging: hole 1/1\n"


def test_units_in_capitals_have_no_plural(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter((0.0, 0.0, 2.0, 2.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with shown(), progress("reading", 3, "MB") as update:
        update(3)
    assert capsys.readouterr().out == "reading: MB 3/3, 1.5 MB/s\n"


def test_a_terminal_has_a_live_bar_that_goes_away() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    with shown(terminal):
        work(7, start=3, depth=2.5)
    said = terminal.file.getvalue()
    assert re.search(r"digging.*7/7.*depth 2\.5, .*holes/s", said)
    assert said.endswith("\x1b[2K")  # its line is erased


def test_work_in_another_thread_is_shown_where_it_was_begun(capsys: pytest.CaptureFixture[str]) -> None:
    """Some libraries call back from threads of their own."""
    with shown(), progress("digging", 2, "hole") as update:
        thread = threading.Thread(target=lambda: [update(1), update(2)])
        thread.start()
        thread.join()
    assert "digging: hole 2/2" in capsys.readouterr().out

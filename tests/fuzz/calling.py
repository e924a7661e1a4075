"""Running a command that may be given anything."""

import io
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from tra.cli import main

SECONDS = 120


class Hangs(BaseException):
    """No Exception, which a command might take for an error of its own."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `Hangs` in a block that takes longer."""

    def stop(*_: Any) -> None:
        raise Hangs(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ends_well(arguments: list[str]) -> int:
    """Run a command; it must end with 0, or with 1 or 2 and one line that says why. Returns the code."""
    shown, errors = io.StringIO(), io.StringIO()
    quiet = warnings.catch_warnings(action="ignore")  # which are errors in tests
    with quiet, limited(SECONDS), redirect_stdout(shown), redirect_stderr(errors):
        try:
            code = main(arguments)
        except SystemExit as stop:  # --help
            code = stop.code or 0
    said = [line for line in errors.getvalue().splitlines() if not line.startswith("tra: warning: ")]
    assert code in (0, 1, 2), (arguments, code)
    if code != 0:
        assert len(said) == 1, (arguments, said)
        assert said[0].startswith("tra: error: "), (arguments, said)
    assert "Traceback" not in errors.getvalue()
    return code

"""What the console is told: lines and progress, nothing at all unless somebody asked to see it.

Everything that reports goes through :func:`say` and :func:`progress`. They are silent when the package is called from
Python; a command, or a caller who wants to look on, wraps the work in :func:`shown`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 10.0

Update = Callable[..., None]

_console: ContextVar["Console | None"] = ContextVar("console", default=None)


@contextmanager
def shown(console: "Console | None" = None) -> Iterator[None]:
    """Show lines and progress on a console, that of the process by default, while the block runs.

    Example:
        >>> with shown():
        ...     say("hello")
        hello
    """
    from rich.console import Console

    token = _console.set(console or Console(soft_wrap=True, highlight=False))
    try:
        yield
    finally:
        _console.reset(token)


@contextmanager
def hidden() -> Iterator[None]:
    """Show nothing while the block runs: in all but the first of several processes, say."""
    token = _console.set(None)
    try:
        yield
    finally:
        _console.reset(token)


def say(text: str, style: str | None = None) -> None:
    """A line for whoever looks on."""
    console = _console.get()
    if console is not None:
        _print(console, text, style)


def _print(console: "Console", text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False)


@contextmanager
def progress(description: str, total: int, unit: str, start: int = 0) -> Iterator[Update]:
    """Yield ``update(done, **numbers)``, which shows how far the work is and the numbers given: a live bar on a
    terminal, plain lines elsewhere. ``start`` is how much was done before."""
    console = _console.get()
    if console is None:
        yield lambda done, **numbers: None
    elif console.is_terminal:
        with _bar(console, description, total, unit, start) as update:
            yield update
    else:
        yield _lines(console, description, total, unit, start)


@contextmanager
def _bar(console: "Console", description: str, total: int, unit: str, start: int) -> Iterator[Update]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    clock = _Clock(start)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total, completed=start, numbers="")
        yield lambda done, **numbers: bar.update(
            task, completed=done, numbers=", ".join(_formatted(numbers, clock.speed(done), unit))
        )


def _lines(console: "Console", description: str, total: int, unit: str, start: int) -> Update:
    clock = _Clock(start)
    said, last = time.monotonic(), start

    def update(done: int, **numbers: float) -> None:
        nonlocal said, last
        now = time.monotonic()
        if now - said < SECONDS_BETWEEN_LINES and (done < total or done == last):
            return
        said, last = now, done
        speed = clock.speed(done)
        left = [f"{(total - done) / speed:.0f} s left"] if speed > 0 and done < total else []
        parts = [f"{unit} {done}/{total}", *_formatted(numbers, speed, unit), *left]
        # To the console of the caller: a library may do the work in a thread of its own, which has none.
        _print(console, f"{description}: {', '.join(parts)}")

    return update


class _Clock:
    def __init__(self, start: int) -> None:
        self.start, self.began = start, time.monotonic()

    def speed(self, done: int) -> float:
        """Units per second since the beginning."""
        elapsed = time.monotonic() - self.began
        return (done - self.start) / elapsed if elapsed > 0 else 0.0


def _formatted(numbers: dict[str, float], speed: float, unit: str) -> list[str]:
    parts = [f"{name} {value:.4g}" for name, value in numbers.items()]
    if speed > 0:
        parts.append(f"{speed:.3g} {unit if unit.isupper() else unit + 's'}/s")
    return parts

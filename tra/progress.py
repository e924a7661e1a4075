"""Showing progress: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0

Update = Callable[..., None]


@contextmanager
def progress(console: Console, description: str, total: int, unit: str, start: int = 0) -> Iterator[Update]:
    """Yield ``update(done, **numbers)``, which shows how far the work is and the numbers given.

    ``start`` is how much was done before.
    """
    clock = _Clock(start)
    if console.is_terminal:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        ) as bar:
            task = bar.add_task(description, total=total, completed=start, numbers="")

            def update(done: int, **numbers: float) -> None:
                bar.update(task, completed=done, numbers=_format(numbers, clock.speed(done), unit))

            yield update
    else:
        shown, last = time.monotonic(), start

        def update(done: int, **numbers: float) -> None:
            nonlocal shown, last
            now = time.monotonic()
            if now - shown < SECONDS_BETWEEN_LINES and (done < total or done == last):
                return
            shown, last = now, done
            speed = clock.speed(done)
            left = f", {(total - done) / speed:.0f} s left" if speed > 0 else ""
            console.print(f"{description}: {unit} {done}/{total}, {_format(numbers, speed, unit)}{left}")

        yield update


class _Clock:
    def __init__(self, start: int) -> None:
        self.start, self.began = start, time.monotonic()

    def speed(self, done: int) -> float:
        """Units per second since the beginning."""
        elapsed = time.monotonic() - self.began
        return (done - self.start) / elapsed if elapsed > 0 else 0.0


def _format(numbers: dict[str, float], speed: float, unit: str) -> str:
    shown = [f"{name} {value:.4g}" for name, value in numbers.items()]
    if speed > 0:
        shown.append(f"{speed:.3g} {unit if unit.isupper() else unit + 's'}/s")
    return ", ".join(shown)

"""The log of a run, `metrics.jsonl`: a line of JSON for each entry."""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tra.errors import RunError
from tra.files import opened, write_text


class Log:
    """What a run writes to. Lines after the step that it resumes from are taken out: it will write them again."""

    def __init__(self, path: Path, steps_done: int, active: bool, describe_last: Callable[[], str]) -> None:
        self.path, self.active, self.describe_last = path, active, describe_last
        if active:
            kept = ""
            # A damaged line after the step is of no matter: it will be written again, too.
            for line, entry in log_entries(path) if steps_done > 0 else ():
                kept += line if entry["step"] <= steps_done else ""
                if entry["step"] >= steps_done:
                    break
            if not path.exists() or path.read_bytes() != kept.encode():
                write_text(path, kept)
            # Unbuffered: after a failed write nothing is left that closing would try to write again.
            self.file = open(path, "ab", buffering=0)

    def write(self, entry: Mapping[str, float]) -> None:
        if not self.active:
            return
        try:
            line = json.dumps(entry).encode() + b"\n"
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RunError(
                f"could not write step {entry['step']} to {self.path}: {error}; {self.describe_last()}"
            ) from error

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.file.close()


def log_entries(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Each whole line of a log, and what it says. A RunError names one that is damaged."""
    if not path.exists():
        return
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line.decode())
                numbers = all(isinstance(value, int | float) for value in entry.values())
                damaged = type(entry["step"]) is not int or not numbers
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                damaged = True
            if damaged:
                raise RunError(f"line {number} of {path} is damaged: mend it, or take it out")
            yield line.decode(), entry

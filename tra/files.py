"""Writing files so that a reader, or a process that takes over after a kill, never sees half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def write_whole(path: Path, text: str) -> None:
    """Write aside, flush to the disk, rename."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a failed write does not name its file
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, console: "Console") -> Iterator[None]:
    """Keep other processes from making this file meanwhile; one that has to wait for them says so."""
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=1.0)
    except Timeout:
        console.print(f"waiting for another process, which makes {path}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

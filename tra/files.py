"""Writing files so that a reader, or a process that takes over after a kill, never sees half of one."""

import os
from pathlib import Path


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


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

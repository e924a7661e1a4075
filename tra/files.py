"""Files that a reader, or a process that takes over after a kill, never sees half-written."""

import errno
import glob
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tra.progress import say

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial"
"""Ends the name of what is being written; what a killed process left of it can be removed."""


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a place beside ``path`` to write a file or a folder to, which becomes ``path`` when the block ends well.

    It is flushed to the disk before it is renamed, and replaces what was there, but a file never replaces a folder.
    After an error nothing is left of it.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    _remove(aside)
    try:
        yield aside
        if aside.is_dir():
            for part in aside.iterdir():
                _sync(part)
        _sync(aside)
        if path.is_dir():
            if not aside.is_dir():
                raise IsADirectoryError(errno.EISDIR, "Is a folder, which a file does not replace", str(path))
            remove_folder(path)
        os.replace(aside, path)
        _sync(path.parent)
    except OSError as error:
        # A failed write does not name its file, and nobody knows the one aside.
        unnamed = error.filename is None or str(error.filename).startswith(str(aside))
        raise OSError(error.errno, error.strerror or str(error), str(path) if unnamed else error.filename) from error
    finally:
        _remove(aside)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file with the permissions that other files get; the library's own writes for the user alone."""
    from safetensors.torch import save_file

    path.touch()
    usual = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(usual)


def opened(path: Path) -> BufferedReader:
    """A file to be read. It must be a regular one: a pipe would keep its reader waiting, and a device has no end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return open(path, "rb")


def read_text(path: Path) -> str:
    """What a regular file holds; a ValueError unless that is UTF-8."""
    with opened(path) as file:
        return file.read().decode()


def read_json(path: Path) -> Any:
    """What a file holds; a ValueError unless that is JSON."""
    with opened(path) as file:
        try:
            return json.loads(file.read().decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} is no intact JSON: {error}") from error


def remove_folder(path: Path) -> None:
    """Rename before deleting, so that a kill in between leaves no damaged folder under its name."""
    doomed = path.with_name(f".{path.name}.{os.getpid()}.old{PARTIAL}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def remove_partial(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder."""
    for path in folder.glob(f"*{PARTIAL}"):
        _remove(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from making this file meanwhile; one that has to wait for them says so.

    What a killed process left of it, or of a file that differs in its suffix alone, is removed.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=1.0)
    except Timeout:
        say(f"waiting for another process, which makes {path}")
        lock.acquire()
    try:
        for left in path.parent.glob(f".{glob.escape(path.stem)}.*{PARTIAL}"):
            _remove(left)
        yield
    finally:
        lock.release()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

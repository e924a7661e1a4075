"""Caches on disk: saved to be read again, or kept in a mapped file because they exceed memory."""

import errno
import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO
from zlib import crc32

import torch
from torch import Tensor

from tra.attention.cache import Cache
from tra.errors import RunError
from tra.files import opened, write_tensors, written_aside

FORMAT = "1"
RELEASE_AFTER = 256
"""New tokens at once after which a mapped cache gives its memory back: those of a prompt, not of a new token."""


class FileCache(Cache):
    """A cache whose tensors lie in mapped files: far keys are read from disk when a row reaches them.

    Memory holds the pages in use, and the system may take them back at any time. The files are removed when nobody
    uses them any longer; :func:`save_cache` makes one that stays.

    Args:
        folder: where the files are; it must be on a disk with room for them, not in memory.
        capacity: for how many tokens there is room at first; their place on the disk is taken at once.

    Example:
        >>> cache = FileCache(getfixture("tmp_path"), capacity=64)
        >>> key, value = cache.append(torch.zeros(1, 2, 5, 8), torch.ones(1, 2, 5, 8))
        >>> key.shape, int(value.sum())
        (torch.Size([1, 2, 5, 8]), 80)
    """

    def __init__(self, folder: Path | str, capacity: int = 4096) -> None:
        super().__init__()
        self.folder, self.capacity = Path(folder), capacity
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if not self.folder.is_dir():
            raise ValueError(f"folder must exist, got {self.folder}")
        self._maps: list[mmap.mmap] = []

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            raise ValueError("a cache in a file records no gradients: use torch.no_grad() or inference_mode()")
        stored = super().append(*new)
        if new[0].shape[2] >= RELEASE_AFTER:
            self.release()
        return stored

    def release(self) -> None:
        """Give the memory of all tokens back; what is needed again comes from the disk."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _new_buffers(self, capacity: int, like: tuple[Tensor, ...]) -> list[Tensor]:
        shapes = [(*tensor.shape[:2], max(capacity, self.capacity), *tensor.shape[3:]) for tensor in like]
        made = [self._mapped(shape, tensor.dtype) for shape, tensor in zip(shapes, like, strict=True)]
        self._maps = [mapped for mapped, _ in made]
        return [buffer for _, buffer in made]

    def _mapped(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[mmap.mmap, Tensor]:
        count = math.prod(shape)
        try:
            with TemporaryFile(dir=self.folder) as file:  # has no name, so nothing is left behind
                _take_place(file, max(count, 1) * dtype.itemsize)
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            room = f"{count * dtype.itemsize:,} bytes"
            raise RunError(f"could not make a cache of {room} in {self.folder}: {error}") from error
        mapped.madvise(mmap.MADV_RANDOM)  # nothing is read ahead: rows stop where they are done
        return mapped, torch.frombuffer(mapped, dtype=dtype, count=max(count, 1))[:count].view(*shape)

    def select(self, rows: Tensor) -> None:
        raise ValueError("the rows of a cache in a file cannot be selected")


def _take_place(file: BinaryIO, size: int) -> None:
    """Make a file of so many bytes, which the disk has: without, a write to mapped memory could kill the process."""
    file.truncate(size)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # of disks that cannot say
                raise


def check_place(path: Path | str) -> None:
    """Raise a RunError where no cache can be saved, before what it is to hold is read."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise RunError(f"could not write the cache {path}: something that is no file has this name")
    if not path.parent.is_dir():
        raise RunError(f"could not write the cache {path}: there is no folder {path.parent}")


def save_cache(
    path: Path | str, caches: Sequence[Cache], about: Mapping[str, str | None], tokens: Tensor | None = None
) -> None:
    """Write what the layers of a model remember, as far as it is used, whole or not at all.

    Args:
        path: a safetensors file.
        caches: one for each layer.
        about: what a reader must know it by: the model's config, say. It is compared by :func:`load_cache`.
        tokens: ``[B, L]``: what was read.
    """
    from safetensors import SafetensorError

    path, lengths = Path(path), [len(cache) for cache in caches]
    if not any(lengths):
        raise ValueError("cache must hold at least one token to be saved")
    if len(set(lengths)) > 1:
        raise ValueError(f"cache must hold as many tokens in every layer to be saved, got {lengths}")
    check_place(path)
    tensors = {
        f"{layer}.{place}": tensor.detach().narrow(2, 0, len(cache)).contiguous()  # a StaticCache gives all its room
        for layer, cache in enumerate(caches)
        for place, tensor in enumerate(cache.stored)
    }
    if tokens is not None:
        expected = [caches[0].batch, len(caches[0])]
        if list(tokens.shape) != expected:
            raise ValueError(f"tokens must have the shape {expected} of the cache, got {list(tokens.shape)}")
        tensors["tokens"] = tokens.contiguous()
    known_by = json.dumps(about, sort_keys=True)
    metadata = {"format": FORMAT, "about": known_by, "checksum": _checksum(known_by, tensors)}
    try:
        with written_aside(path) as aside:
            write_tensors(aside, tensors, metadata)
    except (OSError, SafetensorError) as error:
        raise RunError(f"could not write the cache {path}: {error}") from error


def load_cache(
    path: Path | str, caches: Sequence[Cache], about: Mapping[str, str | None], device: torch.device | str = "cpu"
) -> Tensor | None:
    """Fill empty caches with what :func:`save_cache` wrote, and return the tokens that were read.

    A damaged file, or one of another model, dtype or tokenizer, is a RunError that names what differs. The caches then
    stay empty.
    """
    from safetensors import SafetensorError, safe_open

    if any(len(cache) for cache in caches):
        raise ValueError("cache must be empty to be filled from a file")
    try:
        opened(Path(path)).close()  # a pipe would keep its reader waiting
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise RunError(f"there is no cache {path}") from error
    except OSError as error:
        raise RunError(f"could not read the cache {path}: {error}") from error
    except SafetensorError as error:
        raise RunError(f"{path} is no intact cache: {error}") from error
    if metadata.get("format") != FORMAT:
        raise RunError(f"{path} is no cache of this package, or of another version")
    known_by = metadata.get("about", "")
    if metadata.get("checksum") != _checksum(known_by, tensors):
        raise RunError(f"{path} is no intact cache: its checksum is not that of what it holds")
    stored = json.loads(known_by)
    for name in sorted(stored.keys() | about.keys()):
        if stored.get(name) != about.get(name):
            raise RunError(f"{path} is the cache of another {name}: {stored.get(name)}, not {about.get(name)}")
    tokens = tensors.pop("tokens", None)
    layers = len({name.partition(".")[0] for name in tensors})
    if layers != len(caches):
        raise ValueError(f"cache must have the {layers} layers that {path} holds, got {len(caches)}")
    try:
        with torch.no_grad():
            for layer, cache in enumerate(caches):
                names = sorted(name for name in tensors if name.startswith(f"{layer}."))
                cache.extend(*(tensors[name].to(device) for name in names))
    except Exception:  # no room in one of them, on the disk or by its capacity
        for cache in caches:
            cache.crop(0)
        raise
    return tokens


def _checksum(about: str, tensors: Mapping[str, Tensor]) -> str:
    """Of all that a file says: safetensors itself does not notice a byte that differs."""
    found = crc32(about.encode())
    for name, tensor in sorted(tensors.items()):
        found = crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = crc32(tensor.cpu().view(torch.uint8).numpy().data, found)
    return f"{found:08x}"

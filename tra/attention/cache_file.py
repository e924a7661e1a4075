"""Caches on disk: saved to be read again, or kept in a mapped file because they exceed memory."""

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from tra.attention.cache import Cache
from tra.errors import RunError
from tra.files import written_aside

FORMAT = "1"
RELEASE_AFTER = 256
"""New tokens at once after which a mapped cache gives its memory back: those of a prompt, not of a new token."""


class FileCache(Cache):
    """A cache whose tensors lie in mapped files: far keys are read from disk when a row reaches them.

    Memory holds the pages in use, and the system may take them back at any time. The files are removed when nobody
    uses them any longer; :func:`save_cache` makes one that stays.

    Args:
        folder: where the files are; it must be on a disk with room for them, not in memory.
        capacity: for how many tokens there is room at first. The file is sparse: what is not written takes no place.

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
        capacity, self._maps = max(capacity, self.capacity), []
        shapes = [(*tensor.shape[:2], capacity, *tensor.shape[3:]) for tensor in like]
        return [self._mapped(shape, tensor.dtype) for shape, tensor in zip(shapes, like, strict=True)]

    def _mapped(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        try:
            with TemporaryFile(dir=self.folder) as file:  # has no name, so nothing is left behind
                file.truncate(max(count, 1) * dtype.itemsize)
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            room = f"{count * dtype.itemsize:,} bytes"
            raise RunError(f"could not make a cache of {room} in {self.folder}: {error}") from error
        mapped.madvise(mmap.MADV_RANDOM)  # nothing is read ahead: rows stop where they are done
        self._maps.append(mapped)
        return torch.frombuffer(mapped, dtype=dtype, count=max(count, 1))[:count].view(*shape)

    def select(self, rows: Tensor) -> None:
        raise ValueError("the rows of a cache in a file cannot be selected")


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
    from safetensors.torch import save_file

    if not caches or not len(caches[0]):
        raise ValueError("cache must hold at least one token to be saved")
    tensors = {
        f"{layer}.{place}": tensor.contiguous()
        for layer, cache in enumerate(caches)
        for place, tensor in enumerate(cache.stored)
    }
    if tokens is not None:
        tensors["tokens"] = tokens.contiguous()
    metadata = {"format": FORMAT, "about": json.dumps(about, sort_keys=True)}
    with written_aside(Path(path)) as aside:
        save_file(tensors, aside, metadata)


def load_cache(
    path: Path | str, caches: Sequence[Cache], about: Mapping[str, str | None], device: torch.device | str = "cpu"
) -> Tensor | None:
    """Fill empty caches with what :func:`save_cache` wrote, and return the tokens that were read.

    A file of another model, dtype or tokenizer is a RunError that names what differs. The caches then stay empty.
    """
    from safetensors import SafetensorError, safe_open

    if any(len(cache) for cache in caches):
        raise ValueError("cache must be empty to be filled from a file")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise RunError(f"{path} is no cache of this package, or of another version")
            stored = json.loads(metadata["about"])
            for name in sorted(stored.keys() | about.keys()):
                if stored.get(name) != about.get(name):
                    raise RunError(f"{path} is the cache of another {name}: {stored.get(name)}, not {about.get(name)}")
            found: list[list[Tensor]] = [[] for _ in caches]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tokens = tensors.pop("tokens", None)
        for name in sorted(tensors, key=lambda name: [int(number) for number in name.split(".")]):
            found[int(name.split(".")[0])].append(tensors[name])
    except FileNotFoundError as error:
        raise RunError(f"there is no cache {path}") from error
    except (SafetensorError, IndexError, KeyError, ValueError) as error:
        raise RunError(f"{path} is no intact cache: {error}") from error
    lengths = {tensor.shape[2] if tensor.dim() > 2 else -1 for layer in found for tensor in layer}
    if len(lengths) != 1 or -1 in lengths or not all(found):
        raise RunError(f"{path} is damaged: its tensors have {sorted(lengths)} tokens")
    with torch.no_grad():
        for cache, layer in zip(caches, found, strict=True):
            cache.append(*(tensor.to(device) for tensor in layer))
    return tokens

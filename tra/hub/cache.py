"""The decoder's cache as transformers handles one."""

from itertools import islice
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from tra.attention import Attention, Cache
from tra.attention.cache import StaticCache
from tra.model import Decoder


class TraLayer(CacheLayerMixin):
    """What one layer remembers of earlier tokens: whatever its mechanism stores, of which keys and values come first.

    Args:
        revised: whether later tokens change what is stored of earlier ones, so that none can be forgotten.
        made_for: the mechanism that writes to it, with its heads and their width; None fits any.
    """

    is_sliding = False

    def __init__(self, revised: bool = False, made_for: str | None = None) -> None:
        self.stored: Cache = _Completed()
        self.is_croppable = not revised
        self.made_for = made_for
        self.segments: Tensor | None = None
        """The packed document of each token ``[B, L]``, in the first layer only; None if there is one."""

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self.stored.stored[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.stored.stored[1] if self.is_initialized else None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.stored.batch > 0

    @property
    def batch_size(self) -> int:
        return self.stored.batch

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first tokens decide."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values, *_ = self.stored.append(key_states, value_states)
        return keys, values

    def get_seq_length(self) -> int:
        return len(self.stored)

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.stored) + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must not be positive, got {tokens_to_remove}")
        if tokens_to_remove < 0 and not self.is_croppable:
            raise ValueError("the cache of this mechanism cannot be cropped: its last tokens changed earlier ones")
        self.stored.crop(max(len(self.stored) + tokens_to_remove, 0))
        if self.segments is not None:
            self.segments = self.segments[:, : len(self.stored)]

    def reset(self) -> None:
        self.stored, self.segments = _Completed(), None

    def batch_select_indices(self, indices: Tensor) -> None:
        indices = torch.as_tensor(indices)
        self.stored.select(indices)
        if self.segments is not None:
            self.segments = self.segments.index_select(0, indices.to(self.segments.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.stored.batch).repeat_interleave(repeats))


class TraStaticLayer(TraLayer):
    """The same in buffers of a fixed size, for generation that is compiled.

    Args:
        capacity: the greatest number of tokens.
        made_for: as of a :class:`TraLayer`.
    """

    is_compileable = True

    def __init__(self, capacity: int, made_for: str | None = None) -> None:
        super().__init__(made_for=made_for)
        self.stored: StaticCache = StaticCache(capacity)

    @property
    def max_cache_len(self) -> int:
        return self.stored.capacity

    def get_seq_length(self) -> Any:
        """A tensor: it stays on its device."""
        return self.stored.length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.stored.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.stored.capacity, 0

    def reset(self) -> None:
        if self.is_initialized:
            self.stored.crop(0)


class _Completed(Cache):
    """A cache that may begin with keys and values from elsewhere, as prefix tuning gives them: whatever else the
    mechanism stores is 0 for these tokens."""

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        self._complete(new)
        return super().append(*new)

    def with_new(self, *new: Tensor) -> tuple[Tensor, ...]:
        self._complete(new)
        return super().with_new(*new)

    def _complete(self, new: tuple[Tensor, ...]) -> None:
        if self._buffers:
            capacity = self._buffers[0].shape[2]
            for tensor in new[len(self._buffers) :]:
                self._buffers.append(tensor.new_zeros(*tensor.shape[:2], capacity, *tensor.shape[3:]))


class TraCache(transformers.Cache):
    """What `generate` keeps from token to token: a :class:`TraLayer` for each of the first layers of a decoder."""

    def __init__(self, decoder: Decoder, layers: int | None = None) -> None:
        super().__init__(layers=new_layers(decoder, len(decoder.blocks) if layers is None else layers))


def new_layers(decoder: Decoder, count: int) -> list[Any]:
    """Empty layers for the first blocks of a decoder."""
    found = mechanisms_of(decoder, count)
    return [TraLayer(mechanism.revises_cache, description(mechanism)) for mechanism in found]


def mechanisms_of(decoder: Decoder, count: int) -> list[Attention]:
    """Those of the first blocks, which may be inside other modules."""
    found = (next(x for x in block.modules() if isinstance(x, Attention)) for block in decoder.blocks)
    return list(islice(found, count))


def description(mechanism: Attention) -> str:
    """What a cache must have been made for."""
    norm = "" if mechanism.qk_norm else " without QK-norm"
    return f"{type(mechanism).__name__}{norm} with {mechanism.kv_heads} key heads of width {mechanism.head_width}"


def prepare_cache(cache: Any, decoder: Decoder, count: int) -> list[TraLayer]:
    """What a decoder's first ``count`` blocks are to write to, in a cache of transformers'.

    The layers of a plain `DynamicCache`, which tools pass to any model, become :class:`TraLayer`s in the same cache, so
    that whoever holds it sees it grow, and those of an empty `StaticCache` become :class:`TraStaticLayer`s. Keys that
    it brings are normalised as all others are. Other kinds of cache, and one that another model wrote, are refused by
    name.
    """
    if not isinstance(cache, transformers.Cache):
        raise ValueError(f"past_key_values must be a TraCache or a DynamicCache, got {type(cache).__name__}")
    if getattr(cache, "offloading", False):
        raise ValueError("past_key_values must not be offloaded: layers are read where they are, got offloading=True")
    layers: list[Any] = cache.layers
    if len(layers) != count or not all(isinstance(layer, TraLayer) for layer in layers):
        for layer in layers:
            if type(layer) not in (DynamicLayer, StaticLayer) or type(layer) is not type(layers[0]):
                raise ValueError(
                    f"past_key_values must be a TraCache, a DynamicCache or a StaticCache with the {count} layers of "
                    f"the model, got a {type(cache).__name__} of {len(layers)} {type(layer).__name__}s"
                )
        if layers and type(layers[0]) is StaticLayer:
            layers = _new_static_layers(layers, decoder, count)
        else:
            layers = _converted(layers, decoder, count)
        cache.layers, cache.layer_class_to_replicate = layers, None
    for index, (layer, mechanism) in enumerate(zip(layers, mechanisms_of(decoder, count), strict=True)):
        wanted = description(mechanism)
        if layer.made_for not in (None, wanted):
            raise ValueError(
                f"past_key_values must be a cache of this model, whose layer {index} is {wanted}, "
                f"got one of {layer.made_for}"
            )
    return layers


def _new_static_layers(given: list[Any], decoder: Decoder, count: int) -> list[Any]:
    """Empty layers of the size of those of a `StaticCache`, which must be empty too."""
    if len(given) != count:
        raise ValueError(f"past_key_values must hold the {count} layers of the model, got {len(given)}")
    if any(int(layer.get_seq_length()) for layer in given):
        raise ValueError("past_key_values must be an empty StaticCache, or one that this model has filled")
    found = mechanisms_of(decoder, count)
    for mechanism in found:
        if not mechanism.takes_static_cache:
            raise ValueError(
                f"past_key_values must not be a StaticCache for {type(mechanism).__name__}: its rule needs the number "
                "of tokens while it is compiled; a dynamic cache serves it"
            )
    capacity = given[0].get_max_length()
    return [TraStaticLayer(capacity, description(mechanism)) for mechanism in found]


def _converted(given: list[Any], decoder: Decoder, count: int) -> list[Any]:
    """New layers with what the layers of a `DynamicCache` hold."""
    held = [layer for layer in given if layer.get_seq_length()]
    if held and len(held) != count:
        raise ValueError(f"past_key_values must hold the {count} layers of the model, got {len(held)}")
    layers = new_layers(decoder, count)
    for index, (layer, mechanism, old) in enumerate(zip(layers, mechanisms_of(decoder, count), held, strict=False)):
        shape = (mechanism.kv_heads, mechanism.head_width)
        if (old.keys.shape[1], old.keys.shape[3]) != shape:
            raise ValueError(
                f"past_key_values must hold {shape[0]} key heads of width {shape[1]} in layer {index}, "
                f"got {old.keys.shape[1]} of width {old.keys.shape[3]}"
            )
        layer.update(mechanism.normalised(old.keys), old.values)
    return layers

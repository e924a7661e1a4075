"""The decoder's cache as transformers' generation handles one."""

from typing import Any

import torch
import transformers
from torch import Tensor

from tra.model import Block, Decoder


class TraCache(transformers.Cache):
    """What `generate` keeps from token to token: for each layer, whatever its mechanism stores."""

    is_compileable = False
    layers: list[Any]

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(layers=decoder.new_cache())  # type: ignore[arg-type]
        self.revised = any(isinstance(block, Block) and block.attention.revises_cache for block in decoder.blocks)
        """Whether later tokens change what is stored of earlier ones."""

    @property
    def is_croppable(self) -> bool:
        return not self.revised

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return len(self.layers[layer_idx])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.layers:
            layer.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() > 0:
            self.batch_select_indices(torch.arange(self.layers[0].batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must not be positive, got {tokens_to_remove}")
        if tokens_to_remove < 0 and self.revised:
            raise ValueError("the cache of this mechanism cannot be cropped: its last tokens changed earlier ones")
        for layer in self.layers:
            layer.crop(len(layer) + tokens_to_remove)

    def reset(self) -> None:
        for layer in self.layers:
            layer.crop(0)

"""Small models for tests of `tra.hub`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tra import MECHANISMS
from tra.hub import TraConfig, TraForCausalLM

VOCABULARY = 19
every_mechanism = pytest.mark.parametrize("attention", sorted(MECHANISMS))


def config(attention: str = "tra", **changes: Any) -> TraConfig:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    return TraConfig(**{"vocab_size": VOCABULARY, "attention": attention, **sizes, **changes})


def build(attention: str = "tra", **changes: Any) -> TraForCausalLM:
    """A model none of whose weights is at its start, so that each of them matters."""
    model = TraForCausalLM(config(attention, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def prompt(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows beside one another, padded with tokens that occur, so that only the mask says what is padding."""
    longest = max(len(row) for row in rows)
    tokens = torch.stack([torch.cat([torch.randint(VOCABULARY, (longest - len(row),)), row]) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    return tokens, mask


def generate(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    return model.generate(tokens, **{"max_new_tokens": 16, "do_sample": False, **options})

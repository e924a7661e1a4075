"""Tiny random models of every family that can be adopted."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tra.hub import adopt
from tra.hub.adopted_attention import TraGates
from tra.hub.adoption import FAMILIES

VOCABULARY, WINDOW = 31, 6
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LIKE_LLAMA = {"num_key_value_heads": 2, "intermediate_size": 48}
OWN: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gpt2": {"n_positions": 64},
    "gpt_neox": {"intermediate_size": 48},
    "phi": {"num_key_value_heads": 4, "intermediate_size": 48},
    "qwen3": {"head_dim": 8},
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
WITH_WINDOWS = {"gemma2", "gemma3_text"}


def build_family(family: str, auto: Any = transformers.AutoModelForCausalLM, **changes: Any) -> Any:
    """A model whose scores are large enough that a wrong key shows, and none of whose weights is at its start."""
    own = OWN.get(family, {})
    like_llama = {} if family in ("gpt2", "gpt_neox", "phi") else LIKE_LLAMA
    config = transformers.CONFIG_MAPPING[family](**{**SIZES, **like_llama, **own, **SPECIAL, **changes})
    torch.manual_seed(sum(map(ord, family)))
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def tokens_of(batch: int = 2, length: int = 13) -> torch.Tensor:
    """Without token 0, which is padding."""
    return torch.randint(1, VOCABULARY, (batch, length))


OPEN = {"gate_bias": 100.0, "threshold": None}
"""Gates open and every key kept: the original."""
every_family = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def adopted(family: str, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """A model with gates and thresholds that differ from token to token."""
    model = adopt(build_family(family, **(config or {})), **{"gate_bias": 1.0, "threshold_start": 0.0, **options})
    torch.manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, TraGates):
                for parameter in module.parameters():
                    parameter += 0.1 * torch.randn_like(parameter)
    return model

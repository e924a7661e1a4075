"""A TRA, a RoPE, an adopted Llama and a plain one of one size: what the last can do, the others must."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
import transformers

from tests.hub.models import VOCABULARY, config
from tra.hub.adopted_attention import Options
from tra.hub.adoption import adopted_class

KINDS = ("tra", "rope", "adopted", "llama")
every_kind = pytest.mark.parametrize("kind", KINDS)
own_kinds = pytest.mark.parametrize("kind", KINDS[:2])


def config_of(kind: str, **changes: Any) -> Any:
    if kind not in KINDS[2:]:
        return config(kind, **{"dropout": 0.0, "pad_token_id": 0, **changes})
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    shape = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, **sizes, **special, **changes}
    if kind == "llama":
        return transformers.LlamaConfig(**shape)
    found = adopted_class(transformers.LlamaConfig)(**shape)
    found.tra = asdict(Options(gate_bias=1.0))
    return found


def build_kind(kind: str, auto: Any = transformers.AutoModelForCausalLM, **changes: Any) -> Any:
    """A model none of whose weights is at its start."""
    model = auto.from_config(config_of(kind, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def tokens_of(batch: int = 2, length: int = 9) -> torch.Tensor:
    """Without token 0, which is padding."""
    return torch.randint(1, VOCABULARY, (batch, length))

"""The weights of a Llama in a model of this package."""

from typing import Any

import torch
import transformers

from tra.attention.naming import find_mechanisms
from tra.attention.rope import RotaryAttention
from tra.hub.adapters import OURS
from tra.hub.config import TraConfig
from tra.hub.modeling import TraForCausalLM

SHARED = (
    "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim",
    "intermediate_size", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip


def from_llama(
    model: transformers.LlamaForCausalLM, attention: str = "tra", attention_options: dict[str, Any] | None = None
) -> TraForCausalLM:
    """A model of this package with a Llama's shape and a copy of its weights.

    With ``attention="rope"`` it computes what the Llama does. Another mechanism starts with the Llama's projections,
    and what it has beside them is drawn as in a new model; to keep RoPE under TRA, use :func:`tra.hub.adopt`.

    Args:
        model: the Llama; its RoPE must be of type "default".
        attention: name of the mechanism.
        attention_options: options of the mechanism; QK-norm is off unless they say otherwise, and theta is the Llama's.
    """
    if type(model) is not transformers.LlamaForCausalLM:
        raise ValueError(f"model must be a LlamaForCausalLM, got {type(model).__name__}")
    config: Any = model.config
    rotary = config.rope_parameters
    if rotary["rope_type"] != "default":
        raise ValueError(f"model must have RoPE of type 'default', got {rotary['rope_type']!r}")
    if config.hidden_act != "silu":
        raise ValueError(f"model must have the activation 'silu', got {config.hidden_act!r}")
    options: dict[str, Any] = {"qk_norm": False}
    if any(issubclass(mechanism, RotaryAttention) for mechanism in find_mechanisms(attention)):
        options["theta"] = float(rotary["rope_theta"])
    shared = {name: getattr(config, name) for name in SHARED}
    ours: Any = TraForCausalLM(
        TraConfig(
            attention=attention,
            attention_options={**options, **(attention_options or {})},
            dropout=0.0,
            residual="pre_norm",
            **shared,
        )
    )
    ours.to(device=model.device, dtype=model.dtype)
    missing, unexpected = ours.load_state_dict(renamed(model.state_dict()), strict=False)
    assert not unexpected, unexpected
    assert not any(name.split(".")[-2] in OURS.values() for name in missing), missing
    return ours.eval()


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Llama's weights under the names that they have here; the two projections into its MLP become one."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".gate_proj." in name:
            continue
        if ".up_proj." in name:
            tensor = torch.cat([tensor, weights[name.replace("up_proj", "gate_proj")]])
        parts = [OURS.get(part, part) for part in name.split(".")]
        name = ".".join(parts).replace("self_attn", "attention").replace("embed_tokens", "embedding")
        found[name.replace("model.", "model.decoder.", 1).replace(".layers.", ".blocks.")] = tensor
    return found

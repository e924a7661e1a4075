"""Llama's names in a TraConfig, and a Llama's weights in a model of that shape."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.hub.kinds import build_kind, tokens_of
from tests.hub.models import build, config, prompt
from tra import Decoder, DecoderConfig
from tra.hub import TraConfig, TraForCausalLM, from_llama, to_decoder

SHAPE = {"head_dim": 12, "intermediate_size": 40, "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": False}


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 12, "tie_word_embeddings": True}]
)
@torch.no_grad()
def test_with_rope_it_computes_what_the_llama_does(changes: dict[str, Any]) -> None:
    llama, tokens = build_kind("llama", rms_norm_eps=1e-3, **changes), tokens_of(length=40)
    expected = llama(tokens).logits
    torch.testing.assert_close(from_llama(llama, "rope")(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert (from_llama(llama, "nope")(tokens).logits - expected).abs().max() > 0.1


@torch.no_grad()
def test_tra_starts_with_the_projections_of_the_llama() -> None:
    llama = build_kind("llama", head_dim=12)
    model = from_llama(llama, attention_options={"threshold": "query", "straight_through": 0.5})
    block, layer = model.model.decoder.blocks[1], llama.model.layers[1]
    assert torch.equal(block.attention.query.weight, layer.self_attn.q_proj.weight)
    assert torch.equal(block.mlp.contract.weight, layer.mlp.down_proj.weight)
    assert model(tokens_of()).logits.isfinite().all()


def test_what_is_no_llama_is_refused() -> None:
    with pytest.raises(ValueError, match="model must be a LlamaForCausalLM, got TraForCausalLM"):
        from_llama(build("rope"))  # type: ignore[arg-type]
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="model must have RoPE of type 'default', got 'linear'"):
        from_llama(build_kind("llama", rope_parameters=linear))
    with pytest.raises(ValueError, match="model must have the activation 'silu', got 'gelu'"):
        from_llama(build_kind("llama", hidden_act="gelu"))


@pytest.mark.parametrize("attention", ["tra", "rope", "differential", "cope"])
def test_a_model_of_another_shape_saves_loads_and_generates(attention: str, tmp_path: Path) -> None:
    model, tokens = build(attention, **SHAPE), prompt()
    attends = model.model.decoder.blocks[0].attention
    assert attends.query.weight.shape == (48, 32)
    assert attends.key.bias.shape == (24,)
    assert model.model.decoder.blocks[0].mlp.contract.weight.shape == (32, 40)
    assert model.model.decoder.blocks[0].mlp.contract.bias is None
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert SHAPE.items() <= stored.items()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        assert torch.equal(to_decoder(model)(tokens), model(tokens).logits)


def test_names_of_the_default_shape_are_numbers_and_old_configs_load() -> None:
    new = config()
    assert (new.head_dim, new.intermediate_size, new.attention_bias) == (8, 64, None)
    assert new.decoder_config() == DecoderConfig(19, layers=2, heads=4, width=32, kv_heads=2)
    old = {name: value for name, value in new.to_dict().items() if name not in SHAPE}
    assert TraConfig.from_dict(old).to_dict() == new.to_dict()
    assert TraForCausalLM(new).model.decoder.blocks[0].attention.output.bias is not None
    odd = DecoderConfig(19, layers=1, heads=4, width=30, head_width=8, hidden=50, attention_bias=False)
    assert TraConfig.from_decoder(odd).decoder_config() == odd
    assert Decoder(odd)(prompt()).shape == (2, 7, 19)


@pytest.mark.parametrize(
    "field, wrong", [("head_width", 0), ("hidden", 0), ("norm_epsilon", -1.0), ("attention_bias", "no")]
)
def test_a_wrong_shape_is_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=field):
        DecoderConfig(19, **{field: wrong})

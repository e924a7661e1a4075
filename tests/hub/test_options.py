"""Options of mechanisms in configs and their files, those of version 0.1 too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.hub.models import build, config, generate, prompt
from tra import DecoderConfig
from tra.hub import TraConfig, TraForCausalLM

SOME = [
    ("rope", {"theta": 100.0, "scaling": "linear", "factor": 2.0}),
    ("tra", {"qk_norm": False, "threshold": 0.5}),
    ("tra", {"threshold": "query", "threshold_start": -1.0, "straight_through": 0.5}),
    ("tra-learned", {"threshold": "query"}),
    ("cope", {"positions": 5}),
    ("t5", {"buckets": 8}),
    ("differential", {"lambda_start": 0.3}),
]


@pytest.mark.parametrize("attention, options", SOME)
@torch.no_grad()
def test_a_saved_model_keeps_its_options(attention: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = build(attention, attention_options=options), prompt(length=30)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_options"] == options
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.decoder.config.attention_options == options
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert torch.equal(generate(loaded, tokens), generate(model, tokens))
    plain = TraForCausalLM(config(attention)).eval()
    shapes = {key: value.shape for key, value in plain.state_dict().items()}
    weights = {key: value for key, value in model.state_dict().items() if value.shape == shapes.get(key)}
    plain.load_state_dict(weights, strict=False)
    assert not torch.equal(plain(tokens).logits, model(tokens).logits), "the options mean something"


def test_gradients_pass_the_threshold_however_the_model_is_called() -> None:
    """With the cache that a call makes by itself, without it, and with weights returned."""
    model = build("tra", dropout=0.0, attention_options={"straight_through": 0.5}).train()
    tokens = prompt(length=30)
    projection = model.model.decoder.blocks[0].attention.query.weight

    def gradient(**kwargs: Any) -> torch.Tensor:
        return torch.autograd.grad(model(tokens, labels=tokens, **kwargs).loss, projection)[0]

    expected = gradient(use_cache=False)
    for kwargs in ({"use_cache": True}, {}, {"output_attentions": True}):
        torch.testing.assert_close(gradient(**kwargs), expected, rtol=1e-4, atol=1e-6)
    for block in model.model.decoder.blocks:
        block.attention.straight_through = 0.0
    assert not torch.allclose(gradient(), expected, rtol=1e-2, atol=1e-6)


def test_a_config_with_options_survives_its_file(tmp_path: Path) -> None:
    saved = config("rope", attention_options={"theta": 100})
    saved.save_pretrained(tmp_path)
    for loaded in (
        TraConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        TraConfig.from_dict(saved.to_dict()),
        TraConfig(**saved.to_dict()),
    ):
        assert loaded.to_diff_dict() == saved.to_diff_dict()
        assert loaded.decoder_config() == saved.decoder_config()
    changed = AutoConfig.from_pretrained(tmp_path, attention_options={"theta": 7, "qk_norm": False})
    assert changed.decoder_config().label == "rope qk_norm=False theta=7"
    assert TraConfig(attention="rope").attention_options == {}


def test_a_decoder_and_its_config_have_the_same_options() -> None:
    decoder = DecoderConfig(11, attention="t5", attention_options={"buckets": 8})
    assert TraConfig.from_decoder(decoder).attention_options == {"buckets": 8}
    assert TraConfig.from_decoder(decoder).decoder_config() == decoder


@pytest.mark.parametrize(
    "attention, options, message",
    [
        ("rope", {"thta": 3}, "attention_options of rope must be among qk_norm, theta, .*, got 'thta'; did you mean"),
        ("tra", {"theta": 3}, "attention_options of tra must be among .*, got 'theta'"),
        ("rope", {"theta": "many"}, "theta in attention_options of rope must be a finite number, got 'many'"),
        ("rope", {"theta": -1.0}, "theta must be greater than 1, got -1.0"),
        ("rope", ["theta"], "attention_options must be a dict of options, got"),
    ],
)
def test_a_wrong_option_is_named(attention: str, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config(attention, attention_options=options)
    config(attention).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_options": options}))
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("attention", ["rope", "tra", "differential"])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_what_version_0_1_wrote_computes_the_same(attention: str, qk_norm: bool, tmp_path: Path) -> None:
    """It had qk_norm beside the other fields, and lambda of differential attention started at 0.8 in every layer."""
    options: dict[str, Any] = {} if qk_norm else {"qk_norm": False}
    options |= {"lambda_start": 0.8} if attention == "differential" else {}
    model, tokens = build(attention, attention_options=options), prompt()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    del stored["attention_options"]
    file.write_text(json.dumps({**stored, "qk_norm": qk_norm}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.attention_options == options
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert "qk_norm" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(tokens).logits, model(tokens).logits)

"""Config and weights in files, and what is refused: misspelt keywords, other implementations, code."""

import json
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tests.hub.models import build, config, every_mechanism, generate, prompt
from tra import Decoder, DecoderConfig
from tra.hub import TraConfig, TraForCausalLM, TraModel, from_decoder, to_decoder
from tra.hub.config import NAMES


@every_mechanism
@torch.no_grad()
def test_a_saved_model_gives_the_same_bits(attention: str, tmp_path: Path) -> None:
    model, tokens = build(attention), prompt(length=40)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tra_model.py",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is TraForCausalLM
    assert not loaded.training
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is TraModel
    assert torch.equal(base(tokens, use_cache=False).last_hidden_state, model.model.decoder.hidden(tokens))


@every_mechanism
@torch.no_grad()
def test_folders_written_before_the_head_had_a_name_of_its_own_still_load(attention: str, tmp_path: Path) -> None:
    """Every weight was behind the prefix ``decoder.``, in version 0.1 and after."""
    model, tokens = build(attention), prompt()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert all(name.startswith("model.decoder.") or name == "lm_head.weight" for name in stored)
    old = {
        "decoder.head.weight" if name == "lm_head.weight" else name.removeprefix("model."): tensor
        for name, tensor in stored.items()
    }
    save_file(old, file, metadata={"format": "pt"})
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"] | found["unexpected_keys"]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    base, found = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"] | found["unexpected_keys"]
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == stored.keys()


@every_mechanism
def test_a_new_model_starts_as_the_decoder_does(attention: str) -> None:
    torch.manual_seed(3)
    expected = Decoder(config(attention).decoder_config()).state_dict()
    torch.manual_seed(3)
    found = to_decoder(TraForCausalLM(config(attention))).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@every_mechanism
def test_weights_that_a_file_lacks_start_as_the_decoders_do(attention: str, tmp_path: Path) -> None:
    model = build(attention)
    model.save_pretrained(tmp_path)
    kept = {"model.decoder.norm.weight", "model.decoder.blocks.0.attention.query.weight"}
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name: stored[name] for name in kept}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(3)
    loaded = TraForCausalLM.from_pretrained(tmp_path)
    torch.manual_seed(3)
    new = TraForCausalLM(config(attention))
    for name, tensor in loaded.state_dict().items():
        if name == "lm_head.weight":  # drawn by the same rule, after the others
            assert 0.015 < tensor.std() < 0.025
        else:
            assert torch.equal(tensor, (model if name in kept else new).state_dict()[name]), name
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, new.get_buffer(name)), name


def test_a_trained_decoder_becomes_a_model(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig(vocabulary=11, layers=1, heads=2, width=16, attention="cope", residual="pre_norm"))
    model = from_decoder(decoder.double(), eos_token_id=4, pad_token_id=0)
    tokens = torch.randint(11, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(tokens, use_cache=False).logits, decoder.eval()(tokens))
    assert model.config.decoder_config() == decoder.config
    assert model.generation_config.eos_token_id == 4
    body = {f"model.decoder.{name}" for name in decoder.state_dict() if name != "head.weight"}
    assert set(model.state_dict()) == {*body, "lm_head.weight"}
    with pytest.raises(ValueError, match="model must be a TraForCausalLM, got Decoder"):
        to_decoder(decoder)
    back = to_decoder(model).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in decoder.state_dict().items())
    model.save_pretrained(tmp_path)
    assert TraForCausalLM.from_pretrained(tmp_path).dtype == torch.float64


@every_mechanism
@pytest.mark.parametrize("keyword", ["dtype", "torch_dtype"])
@torch.no_grad()
def test_half_precision(attention: str, keyword: str, tmp_path: Path) -> None:
    model, tokens = build(attention), prompt()
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, **{keyword: torch.bfloat16})
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    logits = half(tokens).logits
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - model(tokens).logits).abs()
    # Most entries, since a score near a threshold may fall on its other side.
    assert error.flatten().quantile(0.8) < 0.05 * model(tokens).logits.abs().max()
    assert generate(half, tokens).shape == (2, 23)


def test_every_field_of_a_decoder_config_has_a_name_here() -> None:
    assert list(NAMES) == [field.name for field in fields(DecoderConfig)]
    decoder = DecoderConfig(7, 1, 2, 8, 1, "t5", {"qk_norm": False, "buckets": 8}, 0.2, "pre_norm", True)
    assert TraConfig.from_decoder(decoder, bos_token_id=3).decoder_config() == decoder


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    saved = config("fot", eos_token_id=[3, 4], pad_token_id=1, use_cache=False, dropout=0.3)
    saved.save_pretrained(tmp_path)
    for loaded in (
        TraConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        TraConfig.from_dict(saved.to_dict()),
        TraConfig(**saved.to_dict()),
    ):
        assert type(loaded) is TraConfig
        assert loaded.to_diff_dict() == saved.to_diff_dict()
    changed = TraConfig.from_pretrained(tmp_path, attention="rope", output_hidden_states=True)
    assert (changed.attention, changed.output_hidden_states, changed.dropout) == ("rope", True, 0.3)
    assert changed != saved


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"num_hiden_layers": 3}, "got 'num_hiden_layers'; did you mean 'num_hidden_layers'?"),
        ({"atention": "rope"}, "got 'atention'; did you mean 'attention'?"),
        ({"temperature": 0.5}, "keyword must be one of .*, got 'temperature'"),
        ({"attention": "ropee"}, "attention must be one of .*, got 'ropee'; did you mean 'rope'?"),
        ({"num_hidden_layers": 0}, "layers must be at least 1, got 0"),
        ({"residual": "post"}, "residual must be 'normalised' or 'pre_norm', got 'post'"),
        ({"tie_word_embeddings": "yes"}, "tied_embeddings must be True or False, got 'yes'"),
    ],
)
def test_a_wrong_keyword_is_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**keywords)


def test_a_misspelt_keyword_is_an_error_when_loading_too(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    for loader in (TraConfig, AutoConfig, TraForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="got 'dropuot'; did you mean 'dropout'"):
            loader.from_pretrained(tmp_path, dropuot=0.5)
        loaded = loader.from_pretrained(tmp_path, dropout=0.5)
        assert getattr(loaded, "config", loaded).dropout == 0.5
    with pytest.raises(ValueError, match="got 'dropuot'; did you mean 'dropout'"):
        TraConfig.from_dict(config().to_dict(), dropuot=0.5)


def test_a_keyword_beside_a_config_is_an_error(tmp_path: Path) -> None:
    """It would change nothing."""
    model = build()
    model.save_pretrained(tmp_path)
    for build_another in (
        lambda: TraForCausalLM(model.config, attention="rope"),
        lambda: TraForCausalLM.from_pretrained(tmp_path, config=model.config, attention="rope"),
        lambda: AutoModelForCausalLM.from_config(model.config, attention="rope"),
        lambda: TraModel(model.config, attention="rope"),
    ):
        with pytest.raises(ValueError, match="attention must be given to the TraConfig, which is already there"):
            build_another()


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"width must be a multiple of heads \(4\), got 30"):
        TraForCausalLM(config(hidden_size=30))
    with pytest.raises(ValueError, match=r"kv_heads must divide heads \(4\), got 3"):
        TraForCausalLM(config(num_key_value_heads=3))


class Spy:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.file, "ran")


def test_loading_runs_no_code_that_a_folder_holds(tmp_path: Path) -> None:
    model, ran = tmp_path / "model", tmp_path / "ran"
    build().save_pretrained(model)
    program = f"from pathlib import Path\nPath({str(ran)!r}).write_text('ran')\n"
    for file in ("modeling_tra.py", "configuration_tra.py", "custom_generate/generate.py"):
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_text(program)
    for loader in (AutoModelForCausalLM, TraForCausalLM):
        loader.from_pretrained(model, trust_remote_code=True)
    assert not ran.exists()

    file = model / "config.json"
    plain = file.read_text()
    code = {"AutoConfig": "configuration_tra.TraConfig", "AutoModelForCausalLM": "modeling_tra.TraForCausalLM"}
    file.write_text(json.dumps({**json.loads(plain), "auto_map": code}))
    for trust in (None, False):  # True is transformers' own way to ask for it
        AutoModelForCausalLM.from_pretrained(model, trust_remote_code=trust)
    for trust in (None, False, True):
        TraForCausalLM.from_pretrained(model, trust_remote_code=trust)
    assert not ran.exists()

    file.write_text(plain)
    (model / "model.safetensors").unlink()
    with (model / "pytorch_model.bin").open("wb") as weights:
        pickle.dump({"decoder.norm.weight": Spy(ran)}, weights)
    for loader in (AutoModelForCausalLM, TraForCausalLM):
        with pytest.raises(OSError, match=r"model\.safetensors"):
            loader.from_pretrained(model)
    with pytest.raises(ValueError, match="use_safetensors must be True"):
        TraForCausalLM.from_pretrained(model, use_safetensors=False)
    assert not ran.exists()


def test_whatever_saves_a_model_says_where_its_code_is(tmp_path: Path) -> None:
    """A model that was loaded, tuned and saved by a Trainer loads elsewhere with `trust_remote_code=True`."""
    model = build()
    model.save_pretrained(tmp_path / "first")
    loaded = TraForCausalLM.from_pretrained(tmp_path / "first")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "second"), report_to="none", use_cpu=True)
    transformers.Trainer(loaded, arguments).save_model()
    for folder in (tmp_path / "first", tmp_path / "second"):
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map["AutoModelForCausalLM"] == "tra_model.TraForCausalLM"
        assert "from tra.hub import *" in (folder / "tra_model.py").read_text()
        found = get_class_from_dynamic_module(auto_map["AutoModelForCausalLM"], folder)
        assert found is TraForCausalLM

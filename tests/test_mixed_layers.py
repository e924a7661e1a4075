"""Layers whose mechanisms take turns, from the config to the hub."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.experiments.small import grid_of, of_flip_flop
from tra import Decoder, DecoderConfig
from tra.attention import MECHANISMS, ThresholdRelativeAttention
from tra.attention.alibi import LinearBiasAttention
from tra.attention.rope import RotaryAttention
from tra.experiments.grid import chosen_rows
from tra.experiments.scales import shrunk
from tra.hub import TraForCausalLM, from_decoder
from tra.recipes import RECIPES, Recipe, build_recipe
from tra.runs import load_run, train


def config(attention: str = "rope+tra", **changes: Any) -> DecoderConfig:
    return replace(DecoderConfig(vocabulary=11, layers=4, heads=4, width=32), attention=attention, **changes)


def test_mechanisms_take_turns_over_the_layers() -> None:
    kinds = [type(block.attention) for block in Decoder(config()).blocks]
    assert kinds == [RotaryAttention, ThresholdRelativeAttention] * 2
    kinds = [type(block.attention) for block in Decoder(config("alibi+alibi+tra", layers=5)).blocks]
    assert kinds == [*[LinearBiasAttention] * 2, ThresholdRelativeAttention, *[LinearBiasAttention] * 2]
    assert [block.attention.layer for block in Decoder(config()).blocks] == [0, 1, 2, 3]


def test_an_option_goes_to_every_mechanism_that_has_it() -> None:
    mixed = config(attention_options={"threshold": 0.5, "theta": 10_000, "qk_norm": False})
    assert mixed.label == "rope+tra qk_norm=False theta=10000 threshold=0.5"
    rope, tra = (block.attention for block in Decoder(mixed).blocks[:2])
    assert not rope.qk_norm
    assert not tra.qk_norm
    assert tra.threshold == 0.5
    assert_close(rope.frequency, RotaryAttention(32, 4, theta=10_000.0).frequency)


@torch.no_grad()
def test_a_model_computes_what_its_layers_compute_one_after_another() -> None:
    torch.manual_seed(0)
    mixed, tokens = Decoder(config(residual="pre_norm")).eval(), torch.randint(11, (2, 23))
    x = mixed.embedding(tokens)
    for block, name in zip(mixed.blocks, ["rope", "tra", "rope", "tra"], strict=True):
        alone = MECHANISMS[name](32, 4).eval()
        alone.load_state_dict(block.attention.state_dict())
        x = x + alone(block.attention_norm(x))
        x = x + block.mlp(block.mlp_norm(x))
    assert_close(mixed(tokens), mixed.head(mixed.norm(x)))


@pytest.mark.parametrize("attention", ["rope+tra", "selective+asentmax+path"])
@torch.no_grad()
def test_generating_with_a_cache_is_generating_without(attention: str) -> None:
    torch.manual_seed(1)
    model, tokens = Decoder(config(attention)).eval(), torch.randint(11, (2, 9))
    found = model.generate(tokens, 6)
    for _ in range(6):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, tokens)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention": "rope+tro"}, "attention must be one of .*, got 'tro'; did you mean 'tra'"),
        ({"attention": "rope+"}, "attention must be one of .*, got ''"),
        ({"attention": ["rope", "tra"]}, r"attention must be a name, or several joined by '\+', got \['rope', 'tra'\]"),
        ({"layers": 1}, r"attention must name at most 1 mechanisms, one for each layer, got 'rope\+tra'"),
        ({"attention_options": {"buckets": 3}}, r"attention_options of rope\+tra must be among .*, got 'buckets'"),
        ({"attention_options": {"theta": 0.5}}, "theta must be greater than 1, got 0.5"),
        ({"attention_options": {"tolerance": -1.0}}, "tolerance must be None or a number of at least 0, got -1.0"),
    ],
)
def test_what_is_wrong_is_named_when_the_config_is_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config(), **changes)


def test_a_run_is_trained_stored_and_read(tmp_path: Path) -> None:
    recipe = shrunk(RECIPES["flip-flop-small"])("rope+tra").changed({"model.attention_options.straight_through": 0.5})
    assert recipe.folder_name() == "flip-flop-small-smoke-rope+tra-straight_through=0.5-0"
    assert recipe.model.layers == 2
    assert Recipe.from_json(recipe.to_json()) == recipe
    train(recipe, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.recipe == recipe
    assert run.model.config.label == "rope+tra straight_through=0.5"
    assert [type(block.attention) for block in run.model.blocks] == [RotaryAttention, ThresholdRelativeAttention]
    assert DecoderConfig.from_dict(asdict(run.model.config)) == run.model.config


def test_every_recipe_takes_several_mechanisms() -> None:
    assert build_recipe("sort-small", "nope+tra").model.label == "nope+tra"


def test_an_experiment_has_a_row_of_it() -> None:
    cells = grid_of(of_flip_flop(), attention=("tra", "rope+tra")).cells()
    assert [cell.row for cell in cells] == ["tra", "rope+tra"]
    assert cells[1].folder == Path("out/runs/flip_flop/rope+tra/0")
    assert cells[1].recipe.model.attention == "rope+tra"
    with pytest.raises(ValueError, match=r"attention must be one of .*, got 'tro'; did you mean 'tra'"):
        chosen_rows(of_flip_flop().rows, ["rope+tro"])


@torch.no_grad()
def test_a_hugging_face_model_has_the_same_layers(tmp_path: Path) -> None:
    torch.manual_seed(2)
    decoder = Decoder(config(attention_options={"theta": 10_000.0})).eval()
    from_decoder(decoder).save_pretrained(tmp_path)
    model, tokens = TraForCausalLM.from_pretrained(tmp_path).eval(), torch.randint(11, (2, 8))
    assert model.config.attention == "rope+tra"
    assert model.config.attention_options == {"theta": 10_000.0}
    assert_close(model(tokens).logits, decoder(tokens))
    generated = model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, decoder.generate(tokens, 5))
    with pytest.raises(ValueError, match=r"attn_implementation must be 'eager': rope\+tra is computed in its own way"):
        TraForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")

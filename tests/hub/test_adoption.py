"""TRA in models of transformers: nothing else changes, and what it computes is TRA."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from tests.hub.families import VOCABULARY, WITH_WINDOWS, build_family, families, tokens_of
from tra.hub import adopt, unadopt
from tra.hub.adopted_attention import TraGates

OPEN = {"gate_bias": 100.0, "threshold": None}
"""Gates open and every key kept: the original."""
every_family = pytest.mark.parametrize("family", families())
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


@every_family
@torch.no_grad()
def test_with_open_gates_and_every_key_kept_the_logits_are_those_of_the_original(family: str) -> None:
    model, tokens = build_family(family), tokens_of()
    expected = model(tokens).logits
    assert expected.std() > 0.05
    copied = adopt(model, **OPEN, copy=True)
    assert type(copied).__name__ == f"Tra{type(model).__name__}"
    close(copied(tokens).logits, expected)
    assert torch.equal(model(tokens).logits, expected), "the original was left alone"


@every_family
@torch.no_grad()
def test_without_positions_it_is_the_same_model_without_positions(family: str) -> None:
    model, tokens = build_family(family), tokens_of()
    found = adopt(model, **OPEN, drop_positions=True, copy=True)(tokens).logits
    assert not torch.allclose(found, model(tokens).logits, atol=1e-3)
    if family == "gpt2":
        model.transformer.wpe.weight.zero_()
    else:
        rotary = model.base_model.rotary_emb
        rotary.register_forward_hook(lambda module, args, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
    close(found, model(tokens).logits)


@every_family
@torch.no_grad()
def test_tokens_one_by_one_and_in_pieces_with_a_cache(family: str) -> None:
    model, tokens = adopted(family), tokens_of()
    expected = model(tokens, use_cache=False).logits
    cache, found = None, []
    for piece in tokens.split([5, 1, 4, 1, 1, 1], dim=1):
        out = model(piece, past_key_values=cache)
        cache = out.past_key_values
        found.append(out.logits)
    close(torch.cat(found, dim=1), expected)


@every_family
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(family: str) -> None:
    model, alone = adopted(family), tokens_of(1, 9)
    padded = torch.cat([torch.randint(1, VOCABULARY, (1, 4)), alone], dim=1)
    tokens, mask = torch.cat([padded, tokens_of(1, 13)]), torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    close(model(tokens, attention_mask=mask, position_ids=positions).logits[:1, 4:], model(alone).logits)
    options = {"max_new_tokens": 5, "do_sample": False}
    together = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(together[:1, 13:], model.generate(alone, **options)[:, 9:])


@every_family
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    model, documents = adopted(family), [tokens_of(1, length) for length in (5, 1, 8)]
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    row = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    begins = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    flattened = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 8, "max_length_k": 8}
    for packing in (
        {"position_ids": positions},
        {"position_ids": positions, "use_cache": False},
        {"position_ids": positions, **flattened},
        {"position_ids": positions, "seq_idx": torch.tensor([[0] * 5 + [1] + [2] * 8])},
    ):
        close(model(row, **packing).logits, alone)
    cache = model(row, position_ids=positions, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must not hold packed documents"):
        model(tokens_of(1, 1), past_key_values=cache)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@torch.no_grad()
def test_documents_that_padding_separates_do_not_see_each_other(family: str) -> None:
    model, first, second = adopted(family), tokens_of(1, 5), tokens_of(1, 6)
    row = torch.cat([first, tokens_of(1, 2), second], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 2 + [1] * 6])
    positions = torch.tensor([[*range(5), 0, 0, *range(6)]])
    close(model(row, attention_mask=mask, position_ids=positions).logits[:, 7:], model(second).logits)


def test_windows_and_the_operator_agree_where_a_window_holds_everything() -> None:
    """Mistral with a window is computed with matrices, without one by the operator: logits and gradients."""
    models = [adopted("mistral", {"sliding_window": size}, straight_through=0.5) for size in (None, 1000)]
    models[1].load_state_dict(models[0].state_dict())
    tokens, mask = tokens_of(), torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    losses = [
        model(tokens, attention_mask=mask, position_ids=positions, labels=tokens.where(mask > 0, -100)).loss
        for model in models
    ]
    close(losses[0], losses[1])
    gradients = [
        torch.autograd.grad(loss, list(model.parameters())) for loss, model in zip(losses, models, strict=True)
    ]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)
    names = dict(models[0].named_parameters())
    touched = [
        name for name, gradient in zip(names, gradients[0], strict=True) if "threshold_bias" in name and gradient.any()
    ]
    assert touched, "thresholds learn"


@torch.no_grad()
def test_windows_stay_windows() -> None:
    model, tokens = adopted("mistral", {"sliding_window": 6, "num_hidden_layers": 1}), tokens_of(1, 20)
    other = torch.cat([tokens_of(1, 8), tokens[:, 8:]], dim=1)
    assert torch.equal(model(tokens).logits[:, 13:], model(other).logits[:, 13:])
    assert not torch.allclose(model(tokens).logits[:, 12], model(other).logits[:, 12])


@torch.no_grad()
def test_weights_that_are_asked_for_are_those_that_mixed_the_values() -> None:
    model, tokens = adopted("llama"), tokens_of()
    out = model(tokens, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 3
    assert len(out.hidden_states) == 4
    close(out.logits, model(tokens).logits)
    for weights in out.attentions:
        assert weights.shape == (2, 4, 13, 13)
        assert (weights.triu(1) == 0).all()
        assert (weights.tril() == 0).any(), "some keys are left out"
        total = weights.sum(-1)
        close(total, (total > 0).float())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_layers_that_are_not_chosen_keep_their_attention(family: str) -> None:
    model, tokens = build_family(family), tokens_of()
    expected = model(tokens).logits
    half = adopt(model, layers=[1], gate_bias=1.0, copy=True)
    assert [hasattr(layer.self_attn, "tra") for layer in half.model.layers] == [False, True, False]
    assert not torch.allclose(half(tokens).logits, expected, atol=1e-3)
    half.model.layers[1].self_attn.tra.gate_bias.fill_(100.0)
    half.model.layers[1].self_attn.tra.threshold_bias.fill_(-1e20)
    close(half(tokens).logits, expected)
    none = adopt(model, layers=[], drop_positions=[0], copy=True)
    assert not torch.allclose(none(tokens).logits, expected, atol=1e-3)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    close(half(tokens, attention_mask=mask).logits[:, 3:], model(tokens, attention_mask=mask).logits[:, 3:])
    cache = half(tokens[:, :9]).past_key_values
    close(half(tokens[:, 9:], past_key_values=cache).logits, expected[:, 9:])


@some_families
def test_beams_and_static_caches_generate_what_recomputing_generates(family: str) -> None:
    model, tokens = adopted(family), tokens_of(2, 7)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = tokens
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(tokens, **options), expected)
    mask = torch.ones_like(tokens)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(tokens, attention_mask=mask, **options, **static), expected)
    beams = model.generate(tokens, **options, num_beams=3)
    assert torch.equal(beams, model.generate(tokens, **options, num_beams=3, use_cache=False))


@some_families
@torch.no_grad()
def test_a_static_cache_in_pieces_and_with_padding(family: str) -> None:
    model, tokens = adopted(family), tokens_of(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    found = []
    for start, end in ((0, 6), (6, 10), (10, 11), (11, 12)):
        part = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        found.append(model(tokens[:, start:end], past_key_values=cache, **part).logits)
    close(torch.cat(found, dim=1)[1], expected[1])
    close(torch.cat(found, dim=1)[0, 3:], expected[0, 3:])


def test_it_compiles_as_one_graph() -> None:
    model, tokens = adopted("llama", {"num_hidden_layers": 1}), tokens_of()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    loss = compiled(tokens, labels=tokens, use_cache=False).loss
    assert all(gradient is not None for gradient in torch.autograd.grad(loss, list(model.parameters())))


def test_lora_leaves_gates_alone_or_trains_them_whole(tmp_path: Path) -> None:
    tokens = tokens_of()
    model = peft.get_peft_model(adopted("llama"), peft.LoraConfig(target_modules="all-linear"))
    assert not any("tra" in name.split(".") for name, one in model.named_parameters() if one.requires_grad)
    model = peft.get_peft_model(adopted("llama"), peft.LoraConfig(modules_to_save=["tra"]))
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert any("gate_bias" in name for name in trained)
    assert any("q_proj.lora_A" in name for name in trained), "peft finds Llama's targets by itself"
    model(tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05
        expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(adopted("llama"), tmp_path)
    with torch.no_grad():
        close(again(tokens).logits, expected)
        close(again.merge_and_unload()(tokens).logits, expected)


@every_family
@torch.no_grad()
def test_a_saved_folder_is_the_same_model_again(family: str, tmp_path: Path) -> None:
    model, tokens = adopted(family, threshold="head", layers=[0, 2]), tokens_of()
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == f"tra_{family}"
    assert config["tra"]["layers"] == [0, 2]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    close(again(tokens).logits, expected)
    assert torch.equal(pickle.loads(pickle.dumps(again))(tokens).logits, again(tokens).logits)
    assert torch.equal(copy.deepcopy(again)(tokens).logits, again(tokens).logits)


def test_elsewhere_the_folder_says_where_its_code_is(tmp_path: Path) -> None:
    """In a process that knows nothing of this package, `trust_remote_code=True` leads to it."""
    model, tokens = adopted("llama", {"num_hidden_layers": 1}), torch.arange(1, 9)[None]
    model.save_pretrained(tmp_path / "model")
    program = (
        "import sys, torch, transformers\n"
        "from transformers import AutoModelForCausalLM\n"
        "try:\n    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)\n"
        "except ValueError as error:\n    assert 'trust_remote_code' in str(error), error\n"
        "else:\n    raise SystemExit('loaded without its code')\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(model(torch.arange(1, 9)[None]).logits.sum().item())"
    )
    options = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert float(done.stdout.split()[-1]) == pytest.approx(model(tokens).logits.sum().item(), rel=1e-4, abs=1e-3)


@torch.no_grad()
def test_weights_of_the_original_load_directly_and_come_back(tmp_path: Path) -> None:
    model, tokens = build_family("llama"), tokens_of()
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "original")
    loaded = adopt(tmp_path / "original", **OPEN)
    close(loaded(tokens).logits, expected)
    loaded.save_pretrained(tmp_path / "adopted")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "adopted")
    direct, info = type(loaded).from_pretrained(tmp_path / "original", config=config, output_loading_info=True)
    assert {key.split(".")[-2] for key in info["missing_keys"]} == {"tra"}
    close(direct(tokens).logits, expected)
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "adopted")
    assert torch.equal(back(tokens).logits, expected)
    restored = unadopt(loaded)
    assert type(restored) is transformers.LlamaForCausalLM
    assert type(restored.config) is transformers.LlamaConfig
    assert type(restored.model) is transformers.LlamaModel
    assert restored.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(restored(tokens).logits, expected)
    assert "tra" not in restored.config.to_dict()
    close(adopt(restored, **OPEN)(tokens).logits, expected)


@torch.no_grad()
def test_classifiers_are_adopted_too(tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    model, tokens = build_family("llama", auto, num_labels=3), tokens_of()
    expected = model(tokens).logits
    adopt(model, **OPEN)
    close(model(tokens).logits, expected)
    model.save_pretrained(tmp_path)
    close(auto.from_pretrained(tmp_path)(tokens).logits, expected)
    new = auto.from_config(model.config)
    assert sum(isinstance(module, TraGates) for module in new.modules()) == 3


@torch.no_grad()
def test_half_precision_keeps_gates_in_the_dtype_of_the_model() -> None:
    model, tokens = build_family("llama").bfloat16(), tokens_of()
    original = model(tokens).logits
    adopt(model, **OPEN)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    found = model(tokens).logits
    assert (found - original).abs().mean() < 0.05 * original.abs().mean()


@torch.no_grad()
def test_yarn_keeps_its_factor_where_positions_are_dropped() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10_000.0}
    model, tokens = build_family("llama", rope_parameters=rope), tokens_of()
    scale = model.model.rotary_emb.attention_scaling
    assert scale != 1.0
    found = adopt(model, **OPEN, drop_positions=True, copy=True)(tokens).logits
    rotary = model.model.rotary_emb
    rotary.register_forward_hook(lambda module, args, out: (torch.full_like(out[0], scale), torch.zeros_like(out[1])))
    close(found, model(tokens).logits)


def test_gpt2_without_positions_reads_beyond_its_last_position() -> None:
    model, tokens = adopted("gpt2", {"n_positions": 16}, drop_positions=True), tokens_of(1, 40)
    with torch.no_grad():
        assert model(tokens).logits.isfinite().all()


def test_another_attention_is_refused_by_an_adopted_model_and_tra_by_others(tmp_path: Path) -> None:
    model = adopted("llama")
    with pytest.raises(ValueError, match="attn_implementation must be 'tra' for an adopted model"):
        model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation must be 'tra' for an adopted model"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_attention_2")
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "tra"
    other = build_family("llama")
    other.set_attn_implementation("tra")
    with pytest.raises(ValueError, match=r"tra\.hub\.adopt\(model\)"):
        other(tokens_of())


@torch.no_grad()
def test_a_config_can_ask_for_attentions() -> None:
    model, tokens = adopted("llama"), tokens_of()
    expected = model(tokens, output_attentions=True).attentions
    model.config.output_attentions = True
    close(torch.stack(model(tokens).attentions), torch.stack(expected))


def tiny(family: str, **more: Any) -> Any:
    config = transformers.CONFIG_MAPPING[family]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": VOCABULARY, **more}
    return transformers.AutoModelForCausalLM.from_config(config(**sizes))


def test_what_cannot_be_adopted_is_named_with_the_reason() -> None:
    for family, reason in (
        ("falcon", "does not go through transformers' AttentionInterface"),
        ("opt", "learned positions"),
        ("bloom", "no test covers it"),
    ):
        with pytest.raises(ValueError, match=f"model must be one of .*, got '{family}': .*{reason}"):
            adopt(tiny(family, **({"ffn_dim": 32, "word_embed_proj_dim": 32} if family == "opt" else {})))
    model = build_family("llama")
    for wrong, message in (
        ({"layers": [3]}, "layers must hold layers from 0 to 2, got 3"),
        ({"layers": 1}, "layers must be a list of layers, got 1"),
        ({"drop_positions": [-1]}, "drop_positions must hold layers from 0 to 2, got -1"),
        ({"threshold": "token"}, "threshold"),
        ({"threshold": float("nan")}, "threshold must be a finite number"),
        ({"gate_bias": float("inf")}, "gate_bias must be a finite number"),
        ({"straight_through": 0.0}, "straight_through must be greater than 0"),
        ({"tolerance": -1.0}, "tolerance must be None or"),
        ({"impl": "fast"}, "impl"),
    ):
        with pytest.raises(ValueError, match=message):
            adopt(model, **wrong)  # type: ignore[arg-type]
        assert type(model) is transformers.LlamaForCausalLM, "nothing is half done"
    with pytest.raises(ValueError, match="drop_positions must be True or False for GPT-2"):
        adopt(build_family("gpt2"), drop_positions=[0])
    with pytest.raises(ValueError, match="model must be a model of transformers or a folder, got Linear"):
        adopt(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    adopt(model)
    with pytest.raises(ValueError, match="model must not be adopted already"):
        adopt(model)
    with pytest.raises(ValueError, match="model must be one that was adopted"):
        unadopt(build_family("llama"))


@pytest.mark.parametrize("family", sorted(WITH_WINDOWS))
@torch.no_grad()
def test_generation_beyond_the_window_of_a_layer(family: str) -> None:
    model, tokens = adopted(family), tokens_of(1, 9)
    found = model.generate(tokens, max_new_tokens=8, do_sample=False)
    expected = tokens
    for _ in range(8):
        expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)


def test_trainer_trains_gates_and_its_folder_loads(tmp_path: Path) -> None:
    model = adopted("llama")
    before = copy.deepcopy(model.state_dict())
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens_of(4, 9)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, learning_rate=0.01, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model()
    changed = {
        name.split(".")[-1] for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert {"gate_bias", "gate_weight", "threshold_bias", "threshold_weight"} <= changed
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = tokens_of()
    with torch.no_grad():
        close(again(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.filterwarnings("default")
def test_quantised_weights_leave_gates_alone(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    model, tokens = adopted("llama"), tokens_of()
    model.save_pretrained(tmp_path)
    asked = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    quantised = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked)
    changed = {
        name.split(".")[-2]
        for name, parameter in quantised.named_parameters()
        if isinstance(parameter.data, torchao.utils.TorchAOBaseTensor)
    }
    assert "q_proj" in changed
    assert "tra" not in changed
    with torch.no_grad():
        error = (quantised(tokens).logits - model(tokens).logits).abs()
    assert error.median() < 0.05 * model(tokens).logits.abs().max()


def test_fsdp_shards_gates_with_their_layers(tmp_path: Path) -> None:
    """On one rank: parameters become shards, and logits and gradients stay."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    model, tokens = adopted("llama"), tokens_of()
    loss = model(tokens, labels=tokens, use_cache=False).loss
    expected = torch.autograd.grad(loss, model.model.layers[0].self_attn.tra.gate_bias)[0]
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded = model(tokens, labels=tokens, use_cache=False).loss
        close(sharded, loss)
        sharded.backward()
        close(model.model.layers[0].self_attn.tra.gate_bias.grad.full_tensor(), expected)
    finally:
        distributed.destroy_process_group()

"""Adopted models with compilers, adapters, files, classifiers, the Trainer, the hub, quantisation and shards."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers

from tests.distributed.processes import run
from tests.hub.families import (
    OPEN,
    adopted,
    build_family,
    close,
    every_family,
    some_families,
    tokens_of,
)
from tra.hub import adopt, unadopt
from tra.hub.adopted_attention import TraGates


def test_it_compiles_as_one_graph() -> None:
    model, tokens = adopted("llama", {"num_hidden_layers": 1}), tokens_of()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    loss = compiled(tokens, labels=tokens, use_cache=False).loss
    assert all(gradient is not None for gradient in torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_padding_and_packed_documents_compile(family: str) -> None:
    model, tokens = adopted(family, {"num_hidden_layers": 2}), tokens_of()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    positions = torch.tensor([[*range(5), *range(8)]]).expand(2, -1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for given in ({"attention_mask": mask}, {"position_ids": positions}):
        expected, found = (one(tokens, use_cache=False, **given).logits for one in (model, compiled))
        close(found[0, 3:], expected[0, 3:])
        close(found[1], expected[1])


@every_family
@pytest.mark.filterwarnings("default:.*is deprecated and will be removed in v6:FutureWarning")  # its name
def test_gradient_checkpointing_changes_no_gradient(family: str) -> None:
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    model, tokens = adopted(family, dropout).train(), tokens_of()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(model(tokens, labels=tokens, use_cache=False).loss, parameters)
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family, target", [("llama", "q_proj"), ("gpt2", "c_attn"), ("phi", "q_proj")])
def test_lora_leaves_gates_alone_or_trains_them_whole(family: str, target: str, tmp_path: Path) -> None:
    tokens, gpt2 = tokens_of(), {"fan_in_fan_out": family == "gpt2"}
    model = peft.get_peft_model(adopted(family), peft.LoraConfig(target_modules="all-linear", **gpt2))
    assert not any("tra" in name.split(".") for name, one in model.named_parameters() if one.requires_grad)
    model = peft.get_peft_model(adopted(family), peft.LoraConfig(modules_to_save=["tra"], **gpt2))
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert any("gate_bias" in name for name in trained)
    assert any(f"{target}.lora_A" in name for name in trained), "peft finds the original's targets by itself"
    model(tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05
        expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(adopted(family), tmp_path)
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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_a_copy_is_independent_and_can_be_unadopted(family: str) -> None:
    original, tokens = build_family(family), tokens_of()
    model = adopt(original, gate_bias=1.0, drop_positions=True, copy=True)
    expected = model(tokens).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens).logits, expected)
        assert torch.equal(unadopt(other)(tokens).logits, original(tokens).logits)
        assert torch.equal(model(tokens).logits, expected)


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


@some_families
@torch.no_grad()
def test_classifiers_are_adopted_too(family: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    model, tokens = build_family(family, auto, num_labels=3), tokens_of()
    expected = model(tokens).logits
    adopt(model, **OPEN)
    close(model(tokens).logits, expected)
    model.save_pretrained(tmp_path)
    close(auto.from_pretrained(tmp_path)(tokens).logits, expected)
    new = auto.from_config(model.config)
    assert sum(isinstance(module, TraGates) for module in new.modules()) == 3


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
    build_family("llama").save_pretrained(tmp_path / "original")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original", attn_implementation="tra")
    for one in (other, loaded):
        with pytest.raises(ValueError, match=r"tra\.hub\.adopt\(model\)"):
            one(tokens_of())


def test_trainer_trains_gates_goes_on_from_a_checkpoint_and_its_folders_load(tmp_path: Path) -> None:
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens_of(8, 9)]

    def trained(folder: str, steps: int, resume: bool = False) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), per_device_train_batch_size=2, max_steps=steps, learning_rate=0.01,
            lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True, save_steps=2,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(adopted("llama"), arguments, train_dataset=rows)  # type: ignore[arg-type]
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer.model.eval()

    whole, before = trained("whole", 4), adopted("llama").state_dict()
    changed = {
        name.split(".")[-1] for name, value in whole.state_dict().items() if not torch.equal(value, before[name])
    }
    assert {"gate_bias", "gate_weight", "threshold_bias", "threshold_weight"} <= changed
    trained("parts", 2)
    parts = trained("parts", 4, resume=True)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in parts.state_dict().items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-4")
    tokens = tokens_of()
    with torch.no_grad():
        close(again(tokens).logits, whole(tokens).logits)


def test_what_is_pushed_to_the_hub_is_the_folder_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a hub that keeps the names of what it gets."""
    received: list[str] = []
    hub = mock.Mock()
    hub.create_repo.return_value.repo_id = "someone/model"

    def commit(**given: Any) -> Any:
        received.extend(operation.path_in_repo for operation in given["operations"])

    hub.create_commit = commit
    monkeypatch.setattr(transformers.utils.hub, "hf_api", lambda: hub)
    monkeypatch.setattr(transformers.utils.hub, "create_and_tag_model_card", lambda *_, **__: hub.card)
    hub.card.save = lambda path: Path(path).write_text("card")
    adopted("llama", {"num_hidden_layers": 1}).push_to_hub("someone/model")
    assert {"config.json", "model.safetensors", "tra_model.py"} <= set(received)


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


@pytest.mark.filterwarnings("default")
def test_a_quantised_model_is_adopted_and_its_gates_are_trained_beside_lora(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    tokens, auto = tokens_of(), transformers.AutoModelForCausalLM
    asked: dict[str, Any] = {
        "quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True),
        "device_map": "cpu",
    }
    build_family("llama").save_pretrained(tmp_path / "original")
    original = auto.from_pretrained(tmp_path / "original", **asked)
    with torch.no_grad():
        expected = original(tokens).logits
        torch.testing.assert_close(adopt(original, **OPEN)(tokens).logits, expected, rtol=1e-3, atol=1e-3)
    adopted("llama").save_pretrained(tmp_path / "adopted")
    model = auto.from_pretrained(tmp_path / "adopted", **asked)
    linear = {
        name.split(".")[-1] for name, one in model.named_modules() if isinstance(one, bitsandbytes.nn.Linear8bitLt)
    }
    assert {"q_proj", "down_proj"} <= linear
    assert all(parameter.is_floating_point() for name, parameter in model.named_parameters() if ".tra." in name)
    tuned = peft.get_peft_model(
        peft.prepare_model_for_kbit_training(model), peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=["tra"])
    )
    tuned(input_ids=tokens, labels=tokens).loss.backward()
    gates = [one for name, one in tuned.named_parameters() if ".tra." in name and one.requires_grad]
    assert gates
    assert all(one.grad is not None for one in gates)


SHARDED = """
from torch.distributed.fsdp import fully_shard
import transformers, tra.hub
model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
assert model.model.layers[0].self_attn.tra.gate_weight.to_local().shape[0] == 2, "half of the heads"
tokens = torch.load(folder / "tokens.pt")[rank : rank + 1]
loss = model(tokens, labels=tokens, use_cache=False).loss
loss.backward()
gradients = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
torch.save({"loss": loss.detach(), **gradients}, folder / f"found-{rank}.pt")
dist.destroy_process_group()
"""


def test_fsdp_shards_gates_with_their_layers(tmp_path: Path) -> None:
    """Two processes with a row each have the loss and the gradients of one with both rows."""
    model, tokens = adopted("llama"), tokens_of()
    model.save_pretrained(tmp_path / "model")
    torch.save(tokens, tmp_path / "tokens.pt")
    run(SHARDED, 2, tmp_path)
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    found = [torch.load(tmp_path / f"found-{rank}.pt") for rank in range(2)]
    close((found[0]["loss"] + found[1]["loss"]) / 2, loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[0][name], parameter.grad, rtol=1e-3, atol=1e-5)

"""Libraries around transformers, with a Llama beside it: peft, TRL, the lm-evaluation-harness, quantisation, ONNX."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hub.kinds import build_kind, every_kind, own_kinds, tokens_of
from tests.hub.models import build as build_own
from tests.hub.models import every_mechanism, generate
from tests.hub.test_generation import word_tokenizer
from tests.pages import DOCS, blocks
from tra.hub import TraForCausalLM

# Importing these libraries warns of matters of their own.
pytestmark = pytest.mark.filterwarnings("default")

DEFAULT_TARGETS = {
    "tra": {"query", "value"},
    "rope": {"query", "value"},
    "adopted": {"q_proj", "v_proj"},
    "llama": {"q_proj", "v_proj"},
}


def tuned(model: Any, configuration: Any, steps: int = 40) -> Any:
    """The model with an adapter that was trained to repeat one sequence."""
    wrapped, tokens = peft.get_peft_model(model, configuration), torch.arange(1, 10).repeat(4, 1)
    before = wrapped(tokens, labels=tokens).loss.item()
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=3e-2)
    wrapped.train()
    for _ in range(steps):
        loss = wrapped(tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert wrapped.eval()(tokens, labels=tokens).loss.item() < 0.8 * before
    return wrapped


@every_kind
def test_lora_finds_its_layers_by_itself(kind: str) -> None:
    wrapped = tuned(build_kind(kind), peft.LoraConfig(task_type="CAUSAL_LM"))
    assert wrapped.peft_config["default"].target_modules == DEFAULT_TARGETS[kind]
    layers = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, _ in wrapped.named_parameters() if "lora_" in name}
    assert layers == DEFAULT_TARGETS[kind]


@every_kind
@pytest.mark.parametrize("method", [peft.PrefixTuningConfig, peft.PromptTuningConfig])
def test_prefixes_and_prompts_are_tuned_and_generated_from(kind: str, method: Any) -> None:
    wrapped = tuned(build_kind(kind), method(task_type="CAUSAL_LM", num_virtual_tokens=4))
    tokens = tokens_of()
    mask = torch.ones_like(tokens)
    cached = generate(wrapped, tokens, attention_mask=mask, max_new_tokens=5)
    assert torch.equal(cached, greedy_without_cache(wrapped, tokens, 5))


@torch.no_grad()
def greedy_without_cache(model: Any, tokens: Tensor, new: int) -> Tensor:
    for _ in range(new):
        logits = model(tokens, attention_mask=torch.ones_like(tokens)).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens


@every_mechanism
def test_every_mechanism_takes_a_prefix(attention: str) -> None:
    """Those too that store more than keys and values."""
    wrapped = peft.get_peft_model(
        build_own(attention), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    tokens = tokens_of()
    out = wrapped(tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
    out.loss.backward()
    (prefix,) = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    assert prefix.grad.abs().sum() > 0
    generated = generate(wrapped.eval(), tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5)
    assert torch.equal(generated, greedy_without_cache(wrapped, tokens, 5))


def trl_options(config: Any, folder: Path, **more: Any) -> Any:
    return config(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=2, learning_rate=1e-3, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, bf16=False,
        gradient_checkpointing=False, logging_steps=1, **more,
    )  # fmt: skip


def sentences(count: int) -> list[str]:
    return [" ".join(f"w{index}" for index in tokens_of(1, 4 + place % 5)[0].tolist()) for place in range(count)]


def logged(trainer: Any, key: str = "loss") -> list[float]:
    """What was logged; the weights of the first layer must have moved."""
    first = next(iter(trainer.model.base_model.parameters())).detach().clone()
    trainer.train()
    assert not torch.equal(next(iter(trainer.model.base_model.parameters())), first)
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@every_kind
@pytest.mark.parametrize("packing", [False, True])
def test_trl_tunes_on_text(kind: str, packing: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    import datasets

    rows = datasets.Dataset.from_dict({"text": sentences(8)})
    options = {"packing": packing, "max_length": 16, "eos_token": "w0"}
    if packing:
        options["padding_free"] = True
    trainer = trl.SFTTrainer(
        build_kind(kind),
        trl_options(trl.SFTConfig, tmp_path, **options),
        train_dataset=rows,
        processing_class=ended_tokenizer(),
    )
    if packing:  # documents in one row do not see each other
        batch = next(iter(trainer.get_train_dataloader()))
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        assert len(starts) > 2
        ids, positions = batch["input_ids"], batch["position_ids"]
        with torch.no_grad():
            packed = trainer.model.eval()(ids, position_ids=positions, use_cache=False).logits
            alone = trainer.model(ids[:, starts[1] : starts[2]]).logits
        torch.testing.assert_close(packed[:, starts[1] : starts[2]], alone, rtol=1e-4, atol=1e-4)
        trainer.model.train()
    losses = logged(trainer)
    assert len(losses) == 2
    assert all(0.5 < loss < 30 for loss in losses)


def ended_tokenizer() -> Any:
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "w0"})
    return tokenizer


@every_kind
def test_trl_prefers_one_answer_to_another(kind: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    import datasets

    build_kind(kind).save_pretrained(tmp_path / "model")  # where the other of the two models is read from
    count = 4
    rows = {"prompt": sentences(count), "chosen": [" w3 w4"] * count, "rejected": [" w5 w6"] * count}
    trainer = trl.DPOTrainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        args=trl_options(trl.DPOConfig, tmp_path, max_length=32),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=ended_tokenizer(),
    )
    losses = logged(trainer)
    assert abs(losses[0] - 0.6931) < 0.02  # before the first step both models are the same: ln 2
    assert losses[1] < losses[0]


@every_kind
def test_trl_rewards_what_it_generates(kind: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    import datasets

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    trainer = trl.GRPOTrainer(
        build_kind(kind),
        reward_funcs=reward,
        args=trl_options(trl.GRPOConfig, tmp_path, num_generations=2, max_completion_length=6),
        train_dataset=datasets.Dataset.from_dict({"prompt": sentences(4)}),
        processing_class=ended_tokenizer(),
    )
    assert all(1 <= found <= 6 for found in logged(trainer, "reward"))


@pytest.mark.parametrize("kind", ["tra", "fot", "llama"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_quantised_weights_leave_the_gate_alone(kind: str, as_dict: bool, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    model, tokens = build_kind(kind), tokens_of()
    model.save_pretrained(tmp_path)
    asked = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    given = asked.to_dict() if as_dict else asked
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=given)
    kinds = {name: type(parameter.data) for name, parameter in quantised.named_parameters()}
    plain = {name.split(".")[-2] for name, found in kinds.items() if found is Tensor}
    changed = {
        name.split(".")[-2] for name, found in kinds.items() if issubclass(found, torchao.utils.TorchAOBaseTensor)
    }
    assert "lm_head" in plain
    if kind == "llama":
        assert {"q_proj", "down_proj"} <= changed
    else:
        assert "gate" in plain - changed
        assert {"query", "key", "value", "output", "expand", "contract"} <= changed
    with torch.no_grad():
        error = (quantised(tokens).logits - model(tokens).logits).abs()
    assert error.median() < 0.05 * model(tokens).logits.abs().max()
    assert asked.modules_to_not_convert is None, "what the caller gave is not changed"
    assert not as_dict or given == asked.to_dict()


@own_kinds
@pytest.mark.parametrize(
    "asked",
    [
        transformers.BitsAndBytesConfig(load_in_8bit=True),
        {"load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
    ],
    ids=["object", "dict", "dict that skips"],
)
def test_bitsandbytes_leaves_the_gate_alone(kind: str, asked: Any, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    build_kind(kind).save_pretrained(tmp_path)
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked, device_map="cpu")
    changed = {
        name.split(".")[-1]
        for name, found in quantised.named_modules()
        if isinstance(found, bitsandbytes.nn.Linear8bitLt)
    }
    assert changed == {"query", "key", "value", "output", "expand", "contract"}


@pytest.mark.parametrize(
    "kind, options",
    [("tra", {}), ("tra-learned", {"attention_options": {"threshold": "query"}}), ("rope", {})],
)
def test_onnx_computes_the_same(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = build_kind(kind, use_cache=False, num_hidden_layers=1, **options)  # a layer takes seconds

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[1, :3] = 0
        return {"input_ids": tokens_of(batch, length), "attention_mask": mask}

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    sizes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    program = torch.onnx.export(model, kwargs=inputs(2, 9), dynamic_shapes=sizes, dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    assert {node.domain for node in program.model.graph} <= {"", "ai.onnx"}, "standard operators only"
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for sizes_now in ((2, 9), (3, 31)):
        given = inputs(*sizes_now)
        (found,) = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
        with torch.no_grad():
            expected = model(**given).logits
        tokens = given["attention_mask"].bool()
        torch.testing.assert_close(torch.from_numpy(found)[tokens], expected[tokens], rtol=1e-3, atol=1e-4)


def test_lm_eval_reads_an_exported_folder(exported: Path, tmp_path: Path) -> None:
    """As a user calls it: it knows the folder only. Answers are as likely as the model itself finds them."""
    pytest.importorskip("lm_eval")
    (task,) = blocks(DOCS / "lm-eval.md", "yaml")
    model, tokenizer = TraForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    question = "The river rises in the hills . In 1847 the river" * 12

    @torch.no_grad()
    def likelihood(answer: str) -> float:
        ids = tokenizer(question + answer, return_tensors="pt")["input_ids"]
        start = len(tokenizer(question)["input_ids"])
        scores = model(ids).logits.log_softmax(-1)[0, start - 1 : -1]
        return scores.gather(1, ids[0, start:, None]).sum().item()

    choices = ([" flooded", " hills"], [" in 1847", " the town ."], [" rises", " ."])
    rows = [{"question": question, "choices": answers} for answers in choices]
    assert len(tokenizer(question)["input_ids"]) > 16, "longer than it was trained on"
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "counting.yaml").write_text(task.replace("rows.json", str(tmp_path / "rows.json")))
    arguments = f"pretrained={exported},trust_remote_code=True,max_length=512"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, "--tasks", "counting"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--device", "cpu"]
    surroundings = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, "--log_samples"], capture_output=True, text=True, env=surroundings, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("samples*.jsonl")
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        found = [float(answer[0]) for answer in sample["filtered_resps"]]
        assert found == pytest.approx([likelihood(answer) for answer in sample["doc"]["choices"]], abs=1e-3)


def test_lm_eval_reads_an_adopted_folder(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokens = build_kind("adopted"), tokens_of(1, 12)
    model.save_pretrained(tmp_path)
    tokenizer = ended_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    known, asked = tokenizer.decode(tokens[0, :8]), " " + tokenizer.decode(tokens[0, 8:])
    harness = HFLM(pretrained=str(tmp_path), device="cpu", max_length=64)
    ((found, _),) = harness.loglikelihood([Instance("loglikelihood", {}, (known, asked), 0)], disable_tqdm=True)
    with torch.no_grad():
        scores = model(tokens).logits.log_softmax(-1)[0, 7:-1]
    assert found == pytest.approx(scores.gather(1, tokens[0, 8:, None]).sum().item(), abs=1e-3)

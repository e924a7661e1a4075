"""A model is changed: resized vocabulary, gradient checkpointing, Trainer, LoRA."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from tests.hub.models import VOCABULARY, build, config, generate, prompt
from tra.hub import TraForCausalLM


@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("size", [VOCABULARY + 8, VOCABULARY - 4])
def test_a_resized_vocabulary_keeps_what_was_learned(size: int, mean_resizing: bool, tmp_path: Path) -> None:
    model, tokens = build(), torch.randint(VOCABULARY - 4, (2, 7))
    with torch.no_grad():
        before = model(tokens).logits
    model.resize_token_embeddings(size, mean_resizing=mean_resizing)
    with torch.no_grad():
        after = model(tokens).logits
    assert after.shape == (2, 7, size)
    kept = min(size, VOCABULARY)
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    assert model.config.vocab_size == model.model.decoder.config.vocabulary == size
    if not mean_resizing:  # new ones start as the decoder's do
        assert model.model.decoder.embedding.weight[kept:].abs().sum() <= 0.01 * max(size - kept, 0) * 32
        assert model.lm_head.weight[kept:].abs().sum() <= 0.1 * max(size - kept, 0) * 32
    model(tokens, labels=tokens).loss.backward()
    assert model.lm_head.weight.grad.shape == (size, 32)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, after)
    base = AutoModel.from_pretrained(tmp_path)
    base.resize_token_embeddings(size + 1)
    assert base.get_input_embeddings().weight.shape == (size + 1, 32)


@pytest.mark.parametrize("attention", ["tra", "rope", "cope"])
@pytest.mark.filterwarnings("default:.*is deprecated and will be removed in v6:FutureWarning")  # its name
def test_gradient_checkpointing_computes_blocks_again_and_changes_no_gradient(attention: str) -> None:
    model, tokens, calls = build(attention, dropout=0.2).train(), prompt(length=20), []
    model.model.decoder.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients() -> list[Tensor]:
        torch.manual_seed(5)
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    assert len(calls) == 1
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    again = gradients()
    assert len(calls) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert generate(model.eval(), tokens).shape == (2, 36)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def counting(rows: int) -> list[dict[str, list[int]]]:
    """Sequences that count upwards, with the first two tokens left out of the loss."""
    starts = torch.randint(VOCABULARY, (rows,)).tolist()
    sequences = [[(start + step) % VOCABULARY for step in range(12)] for start in starts]
    return [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in sequences]


def trainer(model: Any, folder: Path, **options: Any) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=counting(400),
        eval_dataset=counting(16),
        data_collator=transformers.default_data_collator,
    )


@pytest.mark.parametrize("attention, checkpointing", [("tra", False), ("rope", False), ("tra", True)])
def test_trainer_fine_tunes(attention: str, checkpointing: bool, tmp_path: Path) -> None:
    model = TraForCausalLM(config(attention))
    run = trainer(model, tmp_path / "run", max_steps=50, gradient_checkpointing=checkpointing)
    before = run.evaluate()["eval_loss"]
    run.train()
    after = run.evaluate()["eval_loss"]
    assert before > 2.5
    assert after < 1.0
    start = torch.arange(4)[None]
    assert torch.equal(generate(model.eval(), start, max_new_tokens=5), torch.arange(9)[None])
    run.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(loaded(start).logits, model(start).logits)


def test_gradient_accumulation_divides_by_all_labels(tmp_path: Path) -> None:
    """Two steps of four rows are one step of eight, although the rows count different numbers of labels."""
    rows = counting(8)
    for index, row in enumerate(rows):
        row["labels"][2 : 2 + index] = [-100] * index
    found = []
    for size, steps in ((8, 1), (4, 2)):
        torch.manual_seed(0)
        model = TraForCausalLM(config(dropout=0.0))
        run = trainer(model, tmp_path, max_steps=1, gradient_accumulation_steps=steps)
        run.args.per_device_train_batch_size = run._train_batch_size = size
        run.train_dataset = rows
        run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        run.train()
        found.append(model.lm_head.weight.detach())
    torch.testing.assert_close(found[0], found[1])


def test_lora_trains_is_saved_loaded_and_merged(tmp_path: Path) -> None:
    tokens = torch.tensor([row["input_ids"] for row in counting(16)])
    model = build(dropout=0.0)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        untrained = model(tokens).logits
    lora = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, lora)
    trained = [name for name, parameter in tuned.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name for name in trained)
    with torch.no_grad():
        assert torch.equal(tuned(tokens).logits, untrained)

    run = trainer(tuned, tmp_path / "run", max_steps=30)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.8 * before
    tuned.eval()
    tuned.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = tuned(tokens).logits
        again = peft.PeftModel.from_pretrained(TraForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
        assert torch.equal(again(tokens).logits, expected)
        assert torch.equal(generate(again, tokens), generate(again, tokens, use_cache=False))
        merged = again.merge_and_unload()
        assert type(merged) is TraForCausalLM
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        native = TraForCausalLM.from_pretrained(tmp_path / "base")
        native.load_adapter(str(tmp_path / "adapter"))
        assert torch.equal(native(tokens).logits, expected)

"""A short training of an adopted model on text, which heals what it lost, by transformers' Trainer."""

import math
import tempfile
from dataclasses import dataclass
from typing import Any

import accelerate  # noqa: F401  # which the Trainer needs: what is missing is said at once
import torch
import transformers
from transformers.utils import logging

from tra.errors import RunError
from tra.progress import progress, say
from tra.tasks.base import seeded
from tra.text.task import Text
from tra.text.tokenizer import size_of


@dataclass(frozen=True)
class Healing:
    """What an adopted model is trained on, and how."""

    text: str
    """A folder of text files, or wikitext-2 or wikitext-103 from the hub."""
    steps: int = 200
    length: int = 512
    """Tokens of a window."""
    batch: int = 8
    """Windows in a step."""
    learning_rate: float = 3e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("length", 2), ("batch", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0.0 < self.learning_rate < 1.0:
            raise ValueError(f"learning_rate must be between 0 and 1, got {self.learning_rate}")


class _Shown(transformers.TrainerCallback):
    """Tells the console how far the training is."""

    def __init__(self, update: Any) -> None:
        self.update = update

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.update(state.global_step, loss=logs["loss"])


def heal(model: Any, tokenizer: Any, healing: Healing) -> None:
    """Train all weights of a model of transformers in place, in float32, on the device that the Trainer chooses."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("model must have a fast tokenizer, which tokenizer.json holds, to be healed on text")
    known = model.get_input_embeddings().weight.shape[0]
    if size_of(backend) > known:
        raise ValueError(f"model must have a tokenizer of at most its {known} tokens, got one of {size_of(backend)}")
    # Learned positions end at a length, unless they are dropped; rotary positions go on.
    most = None if model.config.tra["drop_positions"] is True else getattr(model.config, "n_positions", None)
    if most is not None and healing.length > most:
        raise ValueError(f"length must be at most the {most} positions of the model, got {healing.length}")
    text = Text(healing.text, None, "the model's")
    text.tokenizer = backend
    count = healing.steps * healing.batch
    windows = text.sample(seeded("healing", healing.seed), count, healing.length - 1).tokens.long()
    rows: Any = [{"input_ids": window, "labels": window} for window in windows]
    dtype = model.dtype
    with tempfile.TemporaryDirectory() as folder, progress("healing", healing.steps, "step") as update:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=healing.steps,
            per_device_train_batch_size=healing.batch,
            learning_rate=healing.learning_rate,
            warmup_steps=min(50, healing.steps // 10),
            weight_decay=0.01,
            adam_beta2=0.95,
            seed=healing.seed,
            logging_steps=1,
            logging_nan_inf_filter=False,  # else a loss of NaN is shown as 0
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(model.float(), arguments, train_dataset=rows, callbacks=[_Shown(update)])
        trainer.remove_callback(transformers.PrinterCallback)
        before = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            trainer.train()
        finally:
            logging.set_verbosity(before)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if not math.isfinite(losses[-1]):
        raise RunError(f"healing diverged: the loss of the last step is {losses[-1]}; try a lower learning_rate")
    say(f"healed for {healing.steps:,} steps: loss {losses[0]:.3f} in the first, {losses[-1]:.3f} in the last")
    model.to(device="cpu", dtype=dtype).eval()

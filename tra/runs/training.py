"""Training a recipe: every step is a function of the recipe and the step's number, so a killed run resumes exactly."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from tra.errors import DivergenceError, Interrupted
from tra.model import Decoder
from tra.progress import hidden, progress, say
from tra.recipes import Recipe
from tra.runs import checkpoint
from tra.runs.batches import training_batches
from tra.runs.distributed import agreed, make_accelerator
from tra.runs.evaluation import measure_all
from tra.runs.folder import Run
from tra.runs.memory import check_training
from tra.runs.step import TrainingStep
from tra.tasks import Batch, Task
from tra.tasks.base import seed_of


def train(recipe: Recipe, folder: Path | str, *, track: Sequence[str] = (), resume: bool = True) -> Run:
    """Train a recipe in a run folder, measure it on its evaluations, and store what was found.

    A run that was interrupted goes on from its last checkpoint, and one that is finished is not touched. Under
    ``torchrun`` or ``accelerate launch`` every process calls this; all of them measure, the first stores.

    Args:
        recipe: what to train.
        folder: the run's folder; see :class:`~tra.runs.Run` for what it will hold.
        track: trackers that accelerate knows, "tensorboard" say, which are told the metrics too.
        resume: False refuses a folder that holds a run already.

    Returns:
        The run, with its ``model`` and ``results``.

    Example:
        >>> from tra.recipes import build_recipe
        >>> recipe = build_recipe("flip-flop-small").changed({"steps": 2, "evaluations": ()})
        >>> folder = getfixture("tmp_path")
        >>> train(recipe, folder).steps_done()
        2
    """
    run, task = Run(folder), recipe.build_task()
    accelerator = make_accelerator(recipe.precision, run.folder, track)
    if recipe.batch % (accelerator.num_processes * recipe.accumulate):
        raise ValueError(
            f"batch must be a multiple of processes x accumulate = "
            f"{accelerator.num_processes} x {recipe.accumulate}, got {recipe.batch}"
        )
    if accelerator.device.type == "cpu":
        rows = recipe.batch // (accelerator.num_processes * recipe.accumulate)
        check_training(recipe.model, rows, recipe.length)
    first = accelerator.is_main_process
    if first:
        run.check_usable(recipe, resume)  # before a text is made ready, which may take long
    with nullcontext() if first else hidden():
        task.prepare(recipe.model.vocabulary, recipe.length, recipe.evaluations)
        with run.claimed() if first else nullcontext():
            trainer = _Trainer(recipe, task, run, accelerator)
            if first:
                run.record(recipe, task)
            model = trainer.train(track)
            # Asked before anything is stored, so that all processes agree.
            if not agreed(run.finished(recipe) is not None):
                results = measure_all(model, task, recipe.evaluations, recipe.model.label)
                if first:
                    run.store_results(recipe.steps, task, results)
            accelerator.end_training()
    # Known already, in every process; nothing need be loaded.
    run.recipe, run.task, run.model, run.step = recipe, task, model.eval(), recipe.steps
    return run


class _Trainer:
    def __init__(self, recipe: Recipe, task: Task, run: Run, accelerator: Accelerator) -> None:
        self.recipe, self.run, self.accelerator = recipe, run, accelerator
        torch.manual_seed(seed_of("weights", recipe.seed))
        self.model = Decoder(recipe.model)
        self.model.checkpoint_blocks = recipe.gradient_checkpointing
        self.step = TrainingStep(
            self.model,
            accelerator,
            learning_rate=recipe.learning_rate,
            beta2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            clip=recipe.clip,
            accumulate=recipe.accumulate,
        )
        self.batch_of_step = training_batches(recipe, task)
        self.saved = 0

    def train(self, track: Sequence[str]) -> Decoder:
        recipe, accelerator = self.recipe, self.accelerator
        first = self._resume()
        if first < recipe.steps:
            self._go_on(first, track)
        if accelerator.is_fsdp2:  # this process holds a share of the model only
            last = self.run.checkpoints.latest()
            assert last is not None
            whole = Decoder(recipe.model)
            whole.load_state_dict(last.tensors("model"))
            return whole.to(accelerator.device)
        # Without the autocast that mixed precision wraps around forward: what is returned is what is saved.
        return accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    def _go_on(self, first: int, track: Sequence[str]) -> None:
        recipe, accelerator, writes = self.recipe, self.accelerator, self.accelerator.is_main_process
        if writes:
            self.run.record_environment(first)
        if track:
            accelerator.init_trackers("tra", config=_flat(asdict(recipe)))
        self.step.model.train()
        with (
            _stop_requested() as stop_requested,
            self.run.logs(first, writes) as (metrics, speed),
            progress(f"{recipe.name} ({recipe.model.label})", recipe.steps, "step", first) as update,
        ):
            started, since = time.monotonic(), first
            for step in range(first, recipe.steps):
                mine = self._part_of(self.batch_of_step(step))
                # Every process must stop at the same step, so the wish to stop travels with the count.
                here = torch.tensor([mine.counted[:, 1:].sum(), stop_requested()], device=accelerator.device)
                counted, stops = accelerator.reduce(here, "sum").tolist()
                if stops:
                    self._save(step)
                    raise Interrupted(
                        f"stopped after {step} of {recipe.steps} steps"
                        + (" and saved a checkpoint" if step > 0 else ", before the first was done")
                    )
                loss, norm = self._step(step, mine, counted)
                done = step + 1
                if done % recipe.log_every == 0 or done == recipe.steps:
                    entry = {"step": done, "loss": loss, "gradient_norm": norm, "learning_rate": self.step.rate}
                    metrics.write(entry)
                    now = time.monotonic()
                    tokens = (done - since) * recipe.batch * mine.tokens.shape[1]
                    speed.write({"step": done, "tokens_per_second": tokens / max(now - started, 1e-9)})
                    started, since = now, done
                    accelerator.log(entry, step=done)
                update(done, loss=loss)
                if done % recipe.checkpoint_every == 0 or done == recipe.steps:
                    self._save(done)

    def _step(self, step: int, mine: Batch, counted: int) -> tuple[float, float]:
        """One update; returns the loss over the whole batch and the norm of its gradient."""
        self.step.rate = self._rate(step)
        # Dropout depends on the step alone, not on what was drawn before it: nothing to save, nothing to restore.
        torch.manual_seed(seed_of("dropout", self.recipe.seed, step, self.accelerator.process_index))
        loss, norm = self.step(mine, counted)
        for name, number in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(number):
                raise DivergenceError(
                    f"the {name} is {number} at step {step + 1}; {self.run.checkpoints.describe_last()}. "
                    f"A lower learning rate (now {self._rate(step):.3g}) may help"
                )
        return loss, norm

    def _rate(self, step: int) -> float:
        return self.recipe.learning_rate * schedule(step, self.recipe.steps, self.recipe.warmup)

    def _part_of(self, batch: Batch) -> Batch:
        size = len(batch) // self.accelerator.num_processes
        first = self.accelerator.process_index * size
        return batch[first : first + size].to(self.accelerator.device)

    def _resume(self) -> int:
        checkpoints = self.run.checkpoints
        if self.accelerator.is_main_process:
            checkpoints.remove_partial()
        self.accelerator.wait_for_everyone()
        found = checkpoints.latest()
        if found is None:
            return 0
        checkpoint.restore(found, self.model, self.step.optimizer.optimizer)
        say(
            f"going on from {found.path}" if found.step < self.recipe.steps else f"{self.run.folder} is trained already"
        )
        self.saved = found.step
        return found.step

    def _save(self, step: int) -> None:
        if step > self.saved:
            parts = checkpoint.gathered(self.model, self.step.optimizer.optimizer)
            if self.accelerator.is_main_process:
                self.run.checkpoints.save(step, parts, self.recipe.keep_checkpoints)
        self.saved = step
        self.accelerator.wait_for_everyone()


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: linear up over the first share of the steps, then a cosine towards 0."""
    rising = warmup * steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))


def _flat(nested: dict[str, Any], before: str = "") -> dict[str, Any]:
    """A recipe as trackers want it: names with dots, and what is neither number nor text written out."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat


@contextmanager
def _stop_requested() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a wish that the loop honours between steps."""
    requested = False
    previous: dict[int, Any] = {}

    def request(number: int, _: object) -> None:
        nonlocal requested
        requested = True
        signal.signal(number, previous[number])  # a second Ctrl-C does not wait for a step that hangs

    if threading.current_thread() is not threading.main_thread():
        yield lambda: requested
        return
    for wanted in (signal.SIGINT, signal.SIGTERM):
        previous[wanted] = signal.signal(wanted, request)
    try:
        yield lambda: requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

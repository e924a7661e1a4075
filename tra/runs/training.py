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
from tra.runs.distributed import agreed, make_accelerator, share_sequences
from tra.runs.evaluation import measure as measure_set
from tra.runs.evaluation import measure_all
from tra.runs.folder import Run
from tra.runs.initial import load_initial_weights
from tra.runs.memory import check_training
from tra.runs.schedule import learning_rate
from tra.runs.step import TrainingStep
from tra.runs.validation import BEFORE, as_metrics
from tra.tasks import Batch, Task
from tra.tasks.base import seed_of


def train(
    recipe: Recipe,
    folder: Path | str,
    *,
    track: Sequence[str] = (),
    resume: bool = True,
    measure: bool = True,
    context_parallel: int = 1,
) -> Run:
    """Train a recipe in a run folder, measure it on its evaluations, and store what was found.

    A run that was interrupted goes on from its last checkpoint, and one that is finished is not touched. A recipe with
    more steps, as :meth:`Recipe.extended <tra.recipes.Recipe.extended>` gives it, extends the run. Under
    ``torchrun`` or ``accelerate launch`` every process calls this; all of them measure, the first stores.

    Args:
        recipe: what to train.
        folder: the run's folder; see :class:`~tra.runs.Run` for what it will hold.
        track: trackers that accelerate knows, "tensorboard" say, which are told the metrics too.
        resume: False refuses a folder that holds a run already.
        measure: False leaves out measuring at the end; :func:`evaluate` does it later.
        context_parallel: how many processes share each sequence, each with a part of its tokens; it divides the number
            of processes. A run may go on with another number.

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
    if context_parallel < 1 or accelerator.num_processes % context_parallel:
        raise ValueError(
            f"context_parallel must divide the number of processes, {accelerator.num_processes}, got {context_parallel}"
        )
    parts = accelerator.num_processes // context_parallel
    if recipe.batch % (parts * recipe.accumulate):
        raise ValueError(
            f"batch must be a multiple of processes x accumulate = {parts} x {recipe.accumulate}, got {recipe.batch}"
        )
    if accelerator.device.type == "cpu":
        rows = recipe.batch // (parts * recipe.accumulate)
        check_training(recipe.model, rows, math.ceil(recipe.length / context_parallel))
    first = accelerator.is_main_process
    if first:
        run.check_usable(recipe, resume)  # before a text is made ready, which may take long
    with nullcontext() if first else hidden():
        task.prepare(recipe.model.vocabulary, recipe.length, recipe.evaluations)
        with run.claimed() if first else nullcontext():
            trainer = _Trainer(recipe, task, run, accelerator, context_parallel)
            if first:
                run.record(recipe, task)
            model = trainer.train(track)
            # Asked before anything is stored, so that all processes agree.
            if measure and not agreed(first and run.finished(recipe) is not None):
                results = measure_all(model, task, recipe.evaluations, recipe.model.label)
                if first:
                    run.store_results(trainer.saved, task, results)
                accelerator.log(as_metrics(results, "evaluation/"), step=trainer.saved)
            accelerator.end_training()
    # Known already, in every process; nothing need be loaded.
    run.recipe, run.task, run.model, run.step = recipe, task, model.eval(), trainer.saved
    return run


class _Trainer:
    def __init__(
        self, recipe: Recipe, task: Task, run: Run, accelerator: Accelerator, context_parallel: int = 1
    ) -> None:
        self.recipe, self.run, self.accelerator = recipe, run, accelerator
        torch.manual_seed(seed_of("weights", recipe.seed))
        self.model = Decoder(recipe.model)
        self.model.checkpoint_blocks = recipe.gradient_checkpointing
        if recipe.init_from is not None and not agreed(bool(run.checkpoints.steps())):
            load_initial_weights(recipe.init_from, self.model)
        self.shards = share_sequences(accelerator, self.model, context_parallel)
        self.sharing = context_parallel
        self.step = TrainingStep(
            self.model,
            accelerator,
            learning_rate=recipe.learning_rate,
            beta2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            clip=recipe.clip,
            accumulate=recipe.accumulate,
            shards=self.shards,
        )
        self.batch_of_step = training_batches(recipe, task)
        self.task, self.validation = task, recipe.validation_sets(task)
        self.validated: Decoder | None = None
        self.saved = 0

    def train(self, track: Sequence[str]) -> Decoder:
        recipe, accelerator = self.recipe, self.accelerator
        first = self._resume()
        if first < recipe.steps and not agreed(self._has_stopped(first)):
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
            self.run.log(first, writes) as metrics,
            progress(f"{recipe.name} ({recipe.model.label})", recipe.steps, "step", first) as update,
        ):
            seconds, since = 0.0, first
            for step in range(first, recipe.steps):
                began = time.monotonic()
                mine = self._part_of(self.batch_of_step(step))
                # Every process must stop at the same step, so the wish to stop travels with the count.
                counts = mine.counted[:, 1:] if self.shards is None else self.shards.shard(mine.counted[:, 1:])
                here = torch.tensor([counts.sum(), stop_requested()], device=accelerator.device)
                counted, stops = accelerator.reduce(here, "sum").tolist()
                if stops:
                    self._save(step)
                    raise Interrupted(
                        f"stopped after {step} of {recipe.steps} steps"
                        + (" and saved a checkpoint" if step > 0 else ", before the first was done")
                    )
                loss, norm = self._step(step, mine, counted)
                done = step + 1
                seconds += time.monotonic() - began
                last = done == recipe.steps
                validates = recipe.validate_every is not None and (last or done % recipe.validate_every == 0)
                best = stopped = False
                if validates or last or done % recipe.log_every == 0:
                    entry = {"step": done, "loss": loss, "gradient_norm": norm, "learning_rate": self.step.rate}
                    if validates:
                        entry |= self._validate(done)
                    tokens = (done - since) * recipe.batch * mine.tokens.shape[1]
                    entry["tokens_per_second"] = tokens / max(seconds, 1e-9)
                    metrics.write(entry)
                    accelerator.log(entry, step=done)
                    seconds, since = 0.0, done
                if validates:
                    best = agreed(writes and self.run.watched().best == done)
                    stopped = agreed(writes and self._has_stopped(done))
                update(done, loss=loss)
                if best or stopped or last or done == recipe.stable_steps or done % recipe.checkpoint_every == 0:
                    self._save(done)
                if stopped:
                    say(
                        f"stopped early after {done} of {recipe.steps} steps: no better {recipe.watch} in the last "
                        f"{recipe.patience} validations"
                    )
                    return

    def _validate(self, done: int) -> dict[str, float]:
        """Every measure of the validation sets, of a copy of the model: what mixed precision and sharding wrap around
        the original stays as it is."""
        recipe = self.recipe
        if self.validated is None:
            self.validated = Decoder(recipe.model).to(self.accelerator.device)
        self.validated.load_state_dict(checkpoint.weights_of(self.model, everywhere=True))
        results = [measure_set(self.validated, self.task, evaluation) for evaluation in self.validation]
        found = as_metrics(results)
        means = (f"{name.replace('_', ' ')} {found[BEFORE + name]:.4g}" for name in results[0].measure_names())
        say(f"validation at step {done}: {', '.join(means)}")
        return found

    def _has_stopped(self, done: int) -> bool:
        """Whether patience has ended with a step."""
        return self.recipe.patience is not None and self.run.watched(done).stopped is not None

    def _step(self, step: int, mine: Batch, counted: int) -> tuple[float, float]:
        """One update; returns the loss over the whole batch and the norm of its gradient."""
        self.step.rate = learning_rate(self.recipe, step)
        # Dropout depends on the step alone, not on what was drawn before it: nothing to save, nothing to restore.
        torch.manual_seed(seed_of("dropout", self.recipe.seed, step, self.accelerator.process_index))
        loss, norm = self.step(mine, counted)
        for name, number in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(number):
                raise DivergenceError(
                    f"the {name} is {number} at step {step + 1}; {self.run.checkpoints.describe_last()}. "
                    f"A lower learning rate (now {self.step.rate:.3g}) may help"
                )
        return loss, norm

    def _part_of(self, batch: Batch) -> Batch:
        size = len(batch) // (self.accelerator.num_processes // self.sharing)
        first = self.accelerator.process_index // self.sharing * size
        return batch[first : first + size].to(self.accelerator.device)

    def _resume(self) -> int:
        checkpoints = self.run.checkpoints
        if self.accelerator.is_main_process:
            checkpoints.remove_partial()
        self.accelerator.wait_for_everyone()
        found = checkpoints.latest()
        if found is None:
            if self.recipe.init_from is not None:  # from here on the run needs nothing but itself
                self._save(0)
            return 0
        checkpoint.restore(found, self.model, self.step.optimizer.optimizer)
        say(
            f"going on from {found.path}" if found.step < self.recipe.steps else f"{self.run.folder} is trained already"
        )
        self.saved = found.step
        return found.step

    def _save(self, step: int) -> None:
        if step > self.saved or step == 0:
            if step == 0:  # to ask for the moments would make some
                parts: dict[str, Any] = {"model": checkpoint.weights_of(self.model), "optimizer": {}}
            else:
                parts = checkpoint.gathered(self.model, self.step.optimizer.optimizer)
            if self.accelerator.is_main_process:
                best = self.run.watched().best if self.validation else None
                # A longer run goes on from where this one's learning rate begins to fall.
                besides = [kept for kept in (best, self.recipe.stable_steps) if kept]
                self.run.checkpoints.save(step, parts, self.recipe.keep_checkpoints, besides)
        self.saved = step
        self.accelerator.wait_for_everyone()


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

"""Training a recipe: every step is a function of the recipe and the step's number, so a killed run resumes exactly."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from tra.errors import DivergenceError, Interrupted
from tra.model import Decoder
from tra.progress import hidden, progress, say
from tra.recipes import Recipe
from tra.runs import checkpoint
from tra.runs.batches import training_batches
from tra.runs.distributed import agreed, check_sharing, make_accelerator, share_sequences
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
    accelerator = make_accelerator(run.folder, track)
    _check_division(recipe, accelerator, context_parallel)
    writes = accelerator.is_main_process
    if writes:
        run.check_usable(recipe, resume)  # before a text is made ready, which may take long
    with nullcontext() if writes else hidden():
        task.prepare(recipe.model.vocabulary, recipe.length, recipe.evaluations)
        with run.claimed() if writes else nullcontext():
            trainer = _Trainer(recipe, task, run, accelerator, context_parallel)
            if writes:
                run.record(recipe, task)
            model = trainer.train(track)
            # Asked before anything is stored, so that all processes agree.
            if measure and not agreed(writes and run.finished(recipe) is not None):
                results = measure_all(model, task, recipe.evaluations, recipe.model.label)
                if writes:
                    run.store_results(trainer.steps_saved, task, results)
                accelerator.log(as_metrics(results, "evaluation/"), step=trainer.steps_saved)
            for tracker in accelerator.trackers:  # the processes stay together: another run may follow
                tracker.finish()
    # Known already, in every process; nothing need be loaded.
    run.recipe, run.task, run.model, run.step = recipe, task, model.eval(), trainer.steps_saved
    return run


def _check_division(recipe: Recipe, accelerator: Accelerator, context_parallel: int) -> None:
    """Whether the processes can share the batch, and each its part of memory."""
    processes = accelerator.num_processes
    check_sharing(recipe.model.attention, context_parallel, processes)
    pieces = processes // context_parallel * recipe.accumulate
    if recipe.batch % pieces:
        raise ValueError(
            f"batch must be a multiple of processes x accumulate = {processes // context_parallel} x "
            f"{recipe.accumulate}, got {recipe.batch}"
        )
    if accelerator.device.type == "cpu":
        check_training(recipe.model, recipe.batch // pieces, math.ceil(recipe.length / context_parallel))


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
        self.shards = share_sequences(self.model, accelerator.device, context_parallel, accelerator.num_processes)
        self.context_parallel = context_parallel
        self.update = TrainingStep(
            self.model,
            accelerator,
            learning_rate=recipe.learning_rate,
            beta2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            clip=recipe.clip,
            accumulate=recipe.accumulate,
            precision=recipe.precision,
            shards=self.shards,
        )
        self.batch_of_step = training_batches(recipe, task)
        self.task, self.validation = task, recipe.validation_sets(task)
        self.validated: Decoder | None = None
        self.steps_saved = 0

    def train(self, track: Sequence[str]) -> Decoder:
        recipe, accelerator = self.recipe, self.accelerator
        steps_done = self._resume()
        if steps_done < recipe.steps and not agreed(self._has_stopped(steps_done)):
            self._take_steps(steps_done, track)
        if accelerator.is_fsdp2:  # this process holds a share of the model only
            last = self.run.checkpoints.latest()
            assert last is not None
            whole = Decoder(recipe.model)
            whole.load_state_dict(last.tensors("model"))
            return whole.to(accelerator.device)
        return self.model

    def _take_steps(self, steps_done: int, track: Sequence[str]) -> None:
        """Those that are left, until patience ends."""
        recipe, accelerator, writes = self.recipe, self.accelerator, self.accelerator.is_main_process
        if writes:
            self.run.record_environment(steps_done)
        if track:
            accelerator.init_trackers("tra", config=_flat(asdict(recipe)))
        self.update.model.train()
        with (
            _stop_requested() as stop_requested,
            self.run.log(steps_done, writes) as metrics,
            progress(f"{recipe.name} ({recipe.model.label})", recipe.steps, "step", steps_done) as show,
        ):
            speed = _Speed(steps_done)
            for index in range(steps_done, recipe.steps):
                with speed.timed():
                    batch = self._part_of(self.batch_of_step(index))
                    loss, norm = self._step(index, batch, self._count(index, batch, stop_requested()))
                done = index + 1
                last = done == recipe.steps
                validates = recipe.validate_every is not None and (last or done % recipe.validate_every == 0)
                if validates or last or done % recipe.log_every == 0:
                    entry = {"step": done, "loss": loss, "gradient_norm": norm, "learning_rate": self.update.rate}
                    if validates:
                        entry |= self._validate(done)
                    entry["tokens_per_second"] = speed.restart(done) * recipe.batch * batch.tokens.shape[1]
                    metrics.write(entry)
                    accelerator.log(entry, step=done)
                best = validates and agreed(writes and self.run.watched().best == done)
                stopped = validates and agreed(writes and self._has_stopped(done))
                show(done, loss=loss)
                if best or stopped or last or done == recipe.stable_steps or done % recipe.checkpoint_every == 0:
                    self._save(done)
                if stopped:
                    say(
                        f"stopped early after {done} of {recipe.steps} steps: no better {recipe.watch} in the last "
                        f"{recipe.patience} validations"
                    )
                    return

    def _count(self, steps_done: int, batch: Batch, stop: bool) -> int:
        """How many tokens of all processes count; with a checkpoint and :class:`Interrupted` where one wants to stop:
        every process must stop at the same step, so the wish travels with the count."""
        counted = batch.counted[:, 1:] if self.shards is None else self.shards.shard(batch.counted[:, 1:])
        here = torch.tensor([counted.sum(), stop], device=self.accelerator.device)
        count, stops = self.accelerator.reduce(here, "sum").tolist()
        if stops:
            self._save(steps_done)
            raise Interrupted(
                f"stopped after {steps_done} of {self.recipe.steps} steps"
                + (" and saved a checkpoint" if steps_done > 0 else ", before the first was done")
            )
        return count

    def _validate(self, done: int) -> dict[str, float]:
        """Every measure of the validation sets, of a copy of the model: of a sharded one this process has a part."""
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

    def _step(self, index: int, batch: Batch, counted: int) -> tuple[float, float]:
        """One update; returns the loss over the whole batch and the norm of its gradient."""
        self.update.rate = learning_rate(self.recipe, index)
        # Dropout depends on the step alone, not on what was drawn before it: nothing to save, nothing to restore.
        torch.manual_seed(seed_of("dropout", self.recipe.seed, index, self.accelerator.process_index))
        loss, norm = self.update(batch, counted)
        for name, number in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(number):
                raise DivergenceError(
                    f"the {name} is {number} at step {index + 1}; {self.run.checkpoints.describe_last()}. "
                    f"A lower learning rate (now {self.update.rate:.3g}) may help"
                )
        return loss, norm

    def _part_of(self, batch: Batch) -> Batch:
        """The rows of this process."""
        size = len(batch) // (self.accelerator.num_processes // self.context_parallel)
        begin = self.accelerator.process_index // self.context_parallel * size
        return batch[begin : begin + size].to(self.accelerator.device)

    def _resume(self) -> int:
        """The steps that the last checkpoint holds."""
        checkpoints = self.run.checkpoints
        if self.accelerator.is_main_process:
            checkpoints.remove_partial()
        self.accelerator.wait_for_everyone()
        found = checkpoints.latest()
        if found is None:
            if self.recipe.init_from is not None:  # from here on the run needs nothing but itself
                self._save(0)
            return 0
        checkpoint.restore(found, self.model, self.update.optimizer.optimizer)
        say(
            f"going on from {found.path}" if found.step < self.recipe.steps else f"{self.run.folder} is trained already"
        )
        self.steps_saved = found.step
        return found.step

    def _save(self, steps_done: int) -> None:
        if steps_done > self.steps_saved or steps_done == 0:
            if steps_done == 0:  # to ask for the moments would make some
                parts: dict[str, dict[str, Tensor]] = {"model": checkpoint.weights_of(self.model), "optimizer": {}}
            else:
                parts = checkpoint.gathered(self.model, self.update.optimizer.optimizer)
            if self.accelerator.is_main_process:
                best = self.run.watched().best if self.validation else None
                # A longer run goes on from where this one's learning rate begins to fall.
                besides = [kept for kept in (best, self.recipe.stable_steps) if kept]
                self.run.checkpoints.save(steps_done, parts, self.recipe.keep_checkpoints, besides)
        self.steps_saved = steps_done
        self.accelerator.wait_for_everyone()


class _Speed:
    """Steps a second since the last entry of the log, without what is measured in between."""

    def __init__(self, steps_done: int) -> None:
        self.seconds, self.since = 0.0, steps_done

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began

    def restart(self, steps_done: int) -> float:
        speed = (steps_done - self.since) / max(self.seconds, 1e-9)
        self.seconds, self.since = 0.0, steps_done
        return speed


def _flat(nested: Mapping[str, object], before: str = "") -> dict[str, float | str]:
    """A recipe as trackers want it: names with dots, and what is neither number nor text written out."""
    flat: dict[str, float | str] = {}
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

"""Training a recipe: every step is a function of the recipe and the step's number, so a killed run resumes exactly."""

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from filelock import FileLock, Timeout
from rich.console import Console
from torch import Tensor

from tra import checkpoint
from tra.errors import Interrupted, RunError
from tra.files import write_whole
from tra.model import Block, Decoder
from tra.progress import progress
from tra.recipes import Recipe
from tra.runs import TOKENIZER
from tra.tasks import Batch
from tra.tasks.base import seed_of, seeded


def train(recipe: Recipe, folder: Path, *, console: Console | None = None, tensorboard: bool = False) -> Decoder:
    """Train a recipe in a run folder, going on from its last checkpoint if there is one, and return the model.

    The folder holds ``recipe.json``, ``metrics.jsonl`` (the same bytes however often the run was interrupted),
    ``speed.jsonl`` and ``checkpoints/``. Under ``torchrun`` or ``accelerate launch`` every process calls this.
    """
    accelerator = _accelerator(recipe, folder, tensorboard)
    console = console or Console()
    if recipe.batch % (accelerator.num_processes * recipe.accumulate):
        raise ValueError(
            f"batch must be a multiple of processes x accumulate = "
            f"{accelerator.num_processes} x {recipe.accumulate}, got {recipe.batch}"
        )
    if recipe.text is not None:
        recipe.check_task(console if accelerator.is_main_process else None)
    with _claimed(folder) if accelerator.is_main_process else nullcontext():
        run = _Run(recipe, folder, accelerator, console, tensorboard)
        if accelerator.is_main_process:
            _record(recipe, folder)
        return run.train()


def _accelerator(recipe: Recipe, folder: Path, tensorboard: bool) -> Accelerator:
    # Accelerate remembers a process's first run; another recipe may want another precision, and the process group
    # of a finished run is gone.
    AcceleratorState._reset_state(reset_partial_state=True)
    sharding = _sharding() if parse_flag_from_env("ACCELERATE_USE_FSDP") else None
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision=recipe.precision,
        fsdp_plugin=sharding,
        log_with="tensorboard" if tensorboard else None,
        project_dir=folder,
    )
    if sharding is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate shards on accelerators alone and would give replicas in silence; PyTorch shards on the CPU too.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator


def _sharding() -> FullyShardedDataParallelPlugin:
    """How FSDP divides a decoder: block by block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Block.__name__],
        cpu_ram_efficient_loading=False,  # every process draws the same weights: nothing to send around
        # The precision of a recipe is autocast, sharded or not: weights and the sum of gradients stay float32.
        mixed_precision_policy=MixedPrecisionPolicy(),
    )


class _Run:
    def __init__(
        self, recipe: Recipe, folder: Path, accelerator: Accelerator, console: Console, tensorboard: bool
    ) -> None:
        self.recipe, self.folder, self.accelerator = recipe, folder, accelerator
        self.console = console if accelerator.is_main_process else Console(quiet=True)
        self.checkpoints = folder / "checkpoints"
        torch.manual_seed(seed_of("weights", recipe.seed))
        self.model = Decoder(recipe.model)
        self.model.checkpoint_blocks = recipe.gradient_checkpointing
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.learning_rate,
            betas=(0.9, recipe.beta2),
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.batch_of_step = training_batches(recipe)
        self.saved = 0
        if tensorboard:
            accelerator.init_trackers("tensorboard")

    def train(self) -> Decoder:
        recipe, accelerator = self.recipe, self.accelerator
        first = self._resume()
        self.wrapped.train()
        with (
            _stop_requested() as stop_requested,
            _Log(self.folder / "metrics.jsonl", first, accelerator.is_main_process) as metrics,
            _Log(self.folder / "speed.jsonl", first, accelerator.is_main_process) as speed,
            progress(self.console, f"{recipe.name} ({recipe.model.attention})", recipe.steps, "step", first) as update,
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
                    rate = self.optimizer.param_groups[0]["lr"]
                    entry = {"step": done, "loss": loss, "gradient_norm": norm, "learning_rate": rate}
                    metrics.write(entry)
                    now = time.monotonic()
                    tokens = (done - since) * recipe.batch * mine.tokens.shape[1]
                    speed.write({"step": done, "tokens_per_second": tokens / max(now - started, 1e-9)})
                    started, since = now, done
                    accelerator.log(entry, step=done)
                update(done, loss=loss)
                if done % recipe.checkpoint_every == 0 or done == recipe.steps:
                    self._save(done)
        accelerator.end_training()
        if accelerator.is_fsdp2:  # this process holds a share of the model only
            last = checkpoint.latest(self.checkpoints)
            assert last is not None
            whole = Decoder(recipe.model)
            whole.load_state_dict(last.tensors("model"))
            return whole.to(accelerator.device)
        # Without the autocast that mixed precision wraps around forward: what is returned is what is saved.
        return accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    def _step(self, step: int, mine: Batch, counted: int) -> tuple[float, float]:
        """One update; returns the loss over the whole batch and the norm of its gradient."""
        recipe, accelerator = self.recipe, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step)
        # Dropout depends on the step alone, not on what was drawn before it: nothing to save, nothing to restore.
        torch.manual_seed(seed_of("dropout", recipe.seed, step, accelerator.process_index))
        total = torch.zeros((), device=accelerator.device)
        rows = len(mine) // recipe.accumulate
        for piece in range(recipe.accumulate):
            last = piece == recipe.accumulate - 1
            with nullcontext() if last else accelerator.no_sync(self.wrapped):
                with accelerator.autocast():
                    summed = summed_loss(self.wrapped, mine[piece * rows : (piece + 1) * rows])
                # Processes average their gradients; divided so, the average is that of one process with the batch.
                accelerator.backward(summed * (accelerator.num_processes / counted))
            total += summed.detach()
        loss = accelerator.reduce(total, "sum").item() / counted
        norm = float(accelerator.clip_grad_norm_(self.wrapped.parameters(), recipe.clip))
        for name, number in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(number):
                raise RunError(
                    f"the {name} is {number} at step {step + 1}; {checkpoint.describe_last(self.checkpoints)}. "
                    f"A lower learning rate (now {self._rate(step):.3g}) may help"
                )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _rate(self, step: int) -> float:
        return self.recipe.learning_rate * schedule(step, self.recipe.steps, self.recipe.warmup)

    def _part_of(self, batch: Batch) -> Batch:
        size = len(batch) // self.accelerator.num_processes
        first = self.accelerator.process_index * size
        return batch[first : first + size].to(self.accelerator.device)

    def _resume(self) -> int:
        if self.accelerator.is_main_process:
            checkpoint.remove_partial(self.checkpoints)
        self.accelerator.wait_for_everyone()
        found = checkpoint.latest(self.checkpoints)
        if found is None:
            return 0
        checkpoint.restore(found, self.model, self.optimizer.optimizer)
        self.console.print(f"going on from {found.path}")
        self.saved = found.step
        return found.step

    def _save(self, step: int) -> None:
        if step > self.saved:
            parts = checkpoint.gathered(self.model, self.optimizer.optimizer)
            if self.accelerator.is_main_process:
                checkpoint.save(self.checkpoints, step, parts, self.recipe.keep_checkpoints)
        self.saved = step
        self.accelerator.wait_for_everyone()


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: linear up over the first share of the steps, then a cosine towards 0."""
    rising = warmup * steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))


def summed_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy summed over the tokens that count."""
    logits, targets, counted = model(batch.tokens[:, :-1]), batch.tokens[:, 1:], batch.counted[:, 1:]
    every = bool(counted.all())  # text, whose logits are too large to be copied for nothing
    logits, targets = (x.flatten(0, 1) if every else x[counted] for x in (logits, targets))
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def training_batches(recipe: Recipe) -> Callable[[int], Batch]:
    """The batch of each step, as a function of the step's number alone."""
    task = recipe.build_task()
    if recipe.data == "fresh":
        return lambda step: task.sample(seeded("train", recipe.seed, step), recipe.batch, recipe.length)
    if recipe.data == "fixed":
        assert recipe.examples is not None
        whole = _fixed_set(recipe, recipe.examples)
    else:
        whole = task.published("train", None if recipe.data == "hub" else Path(recipe.data))
        if whole.tokens.shape[1] != recipe.length:
            raise ValueError(f"length must be that of the data, {whole.tokens.shape[1]}, got {recipe.length}")
        if len(whole) < recipe.batch:
            raise ValueError(f"batch must be at most the {len(whole)} sequences of the data, got {recipe.batch}")
    per_pass = len(whole) // recipe.batch
    order: dict[int, Tensor] = {}

    def batch_of_step(step: int) -> Batch:
        this_pass, position = divmod(step, per_pass)
        if this_pass not in order:
            order.clear()
            order[this_pass] = torch.randperm(len(whole), generator=seeded("order", recipe.seed, this_pass))
        return whole[order[this_pass][position * recipe.batch : (position + 1) * recipe.batch]]

    return batch_of_step


def _fixed_set(recipe: Recipe, examples: int) -> Batch:
    """Drawn in blocks of 1,024 sequences and held in bytes where the vocabulary allows."""
    task = recipe.build_task()
    dtype = torch.uint8 if len(task.symbols) <= 256 else torch.int32
    width = task.sample(torch.Generator(), 1, recipe.length).tokens.shape[1]
    tokens = torch.empty(examples, width, dtype=dtype)
    counted = torch.empty(examples, width, dtype=torch.bool)
    for start in range(0, examples, 1024):
        block = task.sample(seeded("fixed", recipe.seed, start), min(1024, examples - start), recipe.length)
        tokens[start : start + 1024] = block.tokens
        counted[start : start + 1024] = block.counted
    return Batch(tokens, counted)


class _Log:
    """JSON lines. Lines after the step that a run resumes from are taken out: it will write them again."""

    def __init__(self, path: Path, first: int, active: bool) -> None:
        self.path, self.active = path, active
        if active:
            write_whole(path, "".join(line for line in _whole_lines(path) if json.loads(line)["step"] <= first))
            # Unbuffered: after a failed write nothing is left that closing would try to write again.
            self.file = open(path, "ab", buffering=0)

    def write(self, entry: dict[str, Any]) -> None:
        if not self.active:
            return
        try:
            line = json.dumps(entry).encode() + b"\n"
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            last = checkpoint.describe_last(self.path.parent / "checkpoints")
            raise RunError(f"could not write step {entry['step']} to {self.path}: {error}; {last}") from error

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.file.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold the run folder against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RunError(f"another process is training in {folder}") from None
    try:
        yield
    finally:
        lock.release()


def _record(recipe: Recipe, folder: Path) -> None:
    """Store the recipe with its run, and the tokenizer of a text, or check that they are those stored."""
    stored = folder / "recipe.json"
    if stored.exists():
        earlier, now = asdict(Recipe.from_json(stored.read_text())), asdict(recipe)
        changed = sorted(name for name in now if earlier[name] != now[name])
        if changed:
            raise ValueError(f"folder {folder} holds a run of another recipe: {', '.join(changed)} differ")
    tokenizer, kept = recipe.build_task().tokenizer_json(), folder / TOKENIZER
    if tokenizer is not None and kept.exists() and kept.read_text(encoding="utf-8") != tokenizer:
        raise ValueError(f"text must be that on which the run in {folder} began: it gives another tokenizer now")
    if tokenizer is not None and not kept.exists():
        write_whole(kept, tokenizer)
    if not stored.exists():
        write_whole(stored, recipe.to_json())


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

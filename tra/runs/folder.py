"""A run's folder: what its files are called, what they hold, and who may write them."""

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from filelock import FileLock, Timeout

from tra import plugins
from tra.environment import Environment, best_device, environment, environment_of_run
from tra.errors import RunError
from tra.files import read_json, read_text, remove_partial, write_json, write_text
from tra.lookup import lookup
from tra.model import Decoder
from tra.recipes import Recipe
from tra.runs.checkpoint import Checkpoint, Checkpoints, fitting
from tra.runs.log import Log, log_entries
from tra.runs.validation import BEFORE, Watched, watch
from tra.tasks import ReadsText, Result, Task

RECIPE = "recipe.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
RESULTS = "results.json"
TOKENIZER = "tokenizer.json"
FAILURE = "failure.txt"
DIVERGED = "diverged: "
"""Begins the reason of a failure that is the recipe's doing."""
INSPECTION = "inspection"
LOCK = ".lock"

PRETRAINED = "pretrained:"
"""Begins the name of a small trained model that comes with the package."""
PRETRAINED_FOLDER = Path(__file__).parent / "pretrained"
BEST = "best"

MAY_CHANGE = {
    *("name", "plugins", "steps", "warmup_steps", "log_every", "checkpoint_every", "keep_checkpoints", "evaluations"),
    *("init_from", "validate_every", "validation", "watch", "patience"),
    *("accumulate", "precision", "gradient_checkpointing", "data", "task_options", "text", "alphabet"),
}
"""What can be another in a stored recipe while its checkpoints are still this run's: a text may have moved, say."""


@dataclass(frozen=True)
class Measured:
    """What was measured, with the weights of which step, of which version of the task, where."""

    step: int
    task_version: int
    environment: Environment
    results: list[Result]


class Run:
    """One run on disk: `recipe.json`, `environment.json`, `metrics.jsonl`, `checkpoints/`, `results.json`, and
    `tokenizer.json` of a run on text.

    Nothing is read before it is asked for.

    Args:
        folder: where it is.
        at: the checkpoint whose model is meant: "best" by validation, or a step; the newest by default.
    """

    def __init__(self, folder: Path | str, at: str | int | None = None) -> None:
        self.folder, self.at = Path(folder), at
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS, lambda: self.identity)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.folder / RECIPE).exists()

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe as it was trained."""
        stored = self.folder / RECIPE
        if not stored.exists():
            raise ValueError(f"run must be a folder that holds {RECIPE}, got {self.folder}")
        try:
            return Recipe.from_json(read_text(stored))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{stored} is not a recipe that this version can read: {error}") from error

    @cached_property
    def identity(self) -> str:
        """What its checkpoints know it by. It is of the recipe as stored, which no later version writes otherwise."""
        _ = self.recipe  # raises what is wrong with it
        stored = read_json(self.folder / RECIPE)
        content = json.dumps({name: stored[name] for name in stored if name not in MAY_CHANGE}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def task(self) -> Task:
        """What it was trained on, with the tokenizer that the run has stored."""
        task = self.recipe.build_task()
        if isinstance(task, ReadsText) and (self.folder / TOKENIZER).exists():
            return task.with_tokenizer(self.folder)
        return task

    @cached_property
    def model(self) -> Decoder:
        """The model of the newest intact checkpoint, or of the one that the run was opened at, on the accelerator if
        there is one, in evaluation mode."""
        found = self.checkpoint()
        if found is None:
            raise RunError(f"run {self.folder} has no intact checkpoint yet")
        model = Decoder(self.recipe.model)
        model.load_state_dict(fitting(found, model))
        self.step = found.step
        return model.to(best_device()).eval()

    def checkpoint(self) -> Checkpoint | None:
        """The newest intact checkpoint, or the one that the run was opened at."""
        if self.at is None:
            return self.checkpoints.latest()
        step = self.best_step() if self.at == BEST else int(self.at)
        if step is None:
            raise ValueError(f"run {self.folder} has no best checkpoint: it was trained without validate_every")
        return self.checkpoints.of_step(step)

    def best_step(self) -> int | None:
        """The step that was best by validation, of those up to the newest checkpoint; None without one."""
        newest = max(self.checkpoints.steps(), default=0)
        return self.watched(newest).best

    @cached_property
    def step(self) -> int:
        """The step of the model."""
        found = self.checkpoint()
        return 0 if found is None else found.step

    @property
    def is_pretrained(self) -> bool:
        """Whether it came with the package, and is only read."""
        return self.folder.parent == PRETRAINED_FOLDER

    @property
    def results(self) -> list[Result]:
        """What was measured last, nothing if nothing was."""
        found = self.measured()
        return [] if found is None else found.results

    @property
    def inspection(self) -> Path:
        """Where pictures of its attention go."""
        own = Path("runs") / f"pretrained-{self.folder.name}" if self.is_pretrained else self.folder
        return own / INSPECTION

    def check_usable(self, recipe: Recipe, resume: bool = True) -> None:
        """Raise a ValueError unless this recipe can be trained here: in a folder that can be written to and holds no
        run, or with `resume` one of the same recipe, or one that it extends. Nothing is made."""
        if self.is_pretrained:
            raise ValueError(f"folder must be another than {self.folder}: begin with its weights by --init-from")
        self._check_place()
        if not self.exists:
            return
        quoted = shlex.quote(str(self.folder))
        finished = not resume and self.finished(self.recipe) is not None
        longer = recipe.steps > self.recipe.steps and set(self.recipe.differences(recipe)) <= {"steps", "warmup_steps"}
        if resume and self.is_extended_by(recipe):
            self._last_common(recipe)
            return
        if longer and not resume and self.recipe.schedule != "cosine":
            raise ValueError(
                f"folder {self.folder} holds this run with {self.recipe.steps} steps: extend it by "
                f"tra train --resume {quoted} --steps {recipe.steps}"
            )
        if longer and finished:
            raise ValueError(
                f"folder {self.folder} holds this run, finished after {self.recipe.steps} steps: it cannot be "
                "extended, because its learning rate has come to its end; train for "
                f"{recipe.steps} steps in another folder, with --output"
            )
        self.check_recipe(recipe)
        if finished:
            raise ValueError(f"folder {self.folder} holds this run, finished: measure it by tra evaluate {quoted}")
        if not resume:
            raise ValueError(
                f"folder {self.folder} already holds this run: go on with it by tra train --resume {quoted}"
            )

    def is_extended_by(self, recipe: Recipe) -> bool:
        """Whether a recipe is that of this run with more steps, which it can go on to."""
        stored = self.recipe
        if stored.schedule == "cosine" or recipe.steps <= stored.steps or recipe.warmup_length != stored.warmup_length:
            return False
        longer = stored.extended(recipe.steps)
        return replace(recipe, warmup_steps=longer.warmup_steps) == longer

    def _last_common(self, recipe: Recipe) -> int:
        """The newest checkpoint whose steps were taken as the longer recipe takes them."""
        common = min(self.recipe.stable_steps, recipe.stable_steps)
        steps = self.checkpoints.steps()
        if steps and min(steps) > common:
            raise ValueError(
                f"folder {self.folder} cannot be extended to {recipe.steps} steps: it needs a checkpoint of step "
                f"{common} or earlier, from before the learning rate fell, and has {', '.join(map(str, steps))}"
            )
        return max((step for step in steps if step <= common), default=0)

    def _extend(self, recipe: Recipe) -> None:
        """Become a longer run. What lies past the steps that both have is removed first: a run that is killed in
        between is still the shorter one."""
        last = self._last_common(recipe)
        self.checkpoints.remove_after(last)
        write_text(self.folder / RECIPE, recipe.to_json())

    def _check_place(self) -> None:
        """Raise a ValueError where no folder can be, without making one."""
        for place in (self.folder, *self.folder.parents):
            if place.is_dir():
                if not os.access(place, os.W_OK):
                    raise ValueError(f"folder must be writable, but {place} is not")
                return
            if place.exists():
                raise ValueError(f"folder must be a folder, but {place} is a file")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder against other processes."""
        self._check_place()
        lock = FileLock(self.folder / LOCK, timeout=0)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise RunError(f"another process is training in {self.folder}") from None
        except OSError as error:  # a system of files that is read-only, say
            raise ValueError(f"folder must be writable, but {self.folder} is not: {error.strerror or error}") from error
        try:
            remove_partial(self.folder)
            yield
        finally:
            lock.release()

    def record(self, recipe: Recipe, task: Task) -> None:
        """Store the recipe, and the tokenizer of a text, or check that they are those stored. They are the run's now:
        nothing need be read again."""
        if self.exists and self.is_extended_by(recipe):
            self._extend(recipe)
        elif self.exists:
            self.check_recipe(recipe)
        if isinstance(task, ReadsText):
            tokenizer, kept = task.tokenizer_json(), self.folder / TOKENIZER
            if not kept.exists():
                write_text(kept, tokenizer)
            elif read_text(kept) != tokenizer:
                raise ValueError(
                    f"text must be that on which the run in {self.folder} began: it gives another tokenizer now"
                )
        if not self.exists:
            write_text(self.folder / RECIPE, recipe.to_json())
        self.recipe, self.task = recipe, task

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise a ValueError that names what differs unless this is the recipe of the run."""
        differ = self.recipe.differences(recipe)
        if differ:
            shown = ", ".join(f"{name} ({stored!r}, now {given!r})" for name, (stored, given) in differ.items())
            raise ValueError(f"folder {self.folder} holds a run of another recipe, with other values of {shown}")

    def record_environment(self, step: int) -> None:
        """Add to `environment.json`, which has an entry for each time that the run began or went on."""
        path = self.folder / ENVIRONMENT
        try:
            earlier = list(read_json(path)) if path.exists() else []
        except (TypeError, ValueError) as error:
            raise RunError(f"{path} is damaged ({error}): move it away to go on") from error
        needed = plugins.versions(self.recipe.plugins)
        write_json(path, [*earlier, {"from_step": step, **environment_of_run(needed)}])

    def log(self, steps_done: int, active: bool = True) -> Log:
        """The log of metrics, for a run that goes on after so many steps; an inactive one writes nothing."""
        return Log(self.folder / METRICS, steps_done, active, self.checkpoints.describe_last)

    def metrics(self) -> list[dict[str, float]]:
        """What was logged: a dict for each line, with step, loss, norm of the gradient, learning rate, tokens per
        second and, where the run validated, every measure of validation."""
        return [entry for _, entry in log_entries(self.folder / METRICS)]

    def steps_done(self) -> int:
        """Steps that have been logged so far."""
        try:
            last = self.metrics()[-1:]
            return int(last[0]["step"]) if last else 0
        except (OSError, RunError):
            return 0

    def store_results(self, step: int, task: Task, results: Sequence[Result]) -> None:
        """Write `results.json`."""
        content = {
            "step": step,
            "steps": self.recipe.steps,
            "task": self.recipe.task,
            "task_version": task.version,
            "measure": task.measure.measure,
            "environment": environment(),
            "results": [result.to_dict() for result in results],
        }
        write_json(self.folder / RESULTS, content)

    def measured(self) -> Measured | None:
        """What was measured last; None if nothing was, or the file is damaged: it can be made again."""
        try:
            stored = read_json(self.folder / RESULTS)
            results = [self.task.measure.from_dict(entry) for entry in stored["results"]]
            return Measured(stored["step"], stored["task_version"], stored["environment"], results)
        except (FileNotFoundError, AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return None
        except OSError as error:
            raise RunError(f"{self.folder / RESULTS} could not be read: {error}") from error

    def finished(self, recipe: Recipe) -> list[Result] | None:
        """What this recipe's run measured at its end, None if that has not come."""
        found = self.measured()
        if found is None or self.recipe != recipe or found.task_version != self.task.version:
            return None
        return found.results if found.step == self.last_step() else None

    def last_step(self) -> int:
        """The step at which the run ends, or ended: early if its patience did."""
        stopped = None if self.recipe.patience is None else self.watched().stopped
        return self.recipe.steps if stopped is None else stopped

    def watched(self, until: int | None = None) -> Watched:
        """What the measure that is watched says, up to a step."""
        recipe = self.recipe
        higher = recipe.watch != "loss" and self.task.measure.higher_is_better
        name, most = BEFORE + recipe.watch, math.inf if until is None else until
        values = [(int(x["step"]), x[name]) for x in self.metrics() if name in x and x["step"] <= most]
        return watch(values, higher, recipe.patience)

    def failure(self) -> str | None:
        """Why the last attempt failed, if it did."""
        reason = self.folder / FAILURE
        return read_text(reason).split("\n\n")[0].strip() if reason.exists() else None

    @property
    def diverged(self) -> bool:
        """Whether the last attempt ended because loss or gradient were not finite."""
        return (self.failure() or "").startswith(DIVERGED)

    def record_failure(self, reason: str | None, details: str = "") -> None:
        """Write down why the run failed, and below it the details, or that it did not."""
        if reason is None:
            (self.folder / FAILURE).unlink(missing_ok=True)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / FAILURE, f"{reason}\n\n{details}" if details else f"{reason}\n")


def folders_of_runs(below: Path) -> list[Path]:
    """Every folder below one that holds a run."""
    return sorted(path.parent for path in below.rglob(RECIPE))


def find_run(name: Path | str) -> Run:
    """The run of a name, whether it is there or not: a folder, FOLDER@best, FOLDER@STEP or pretrained:NAME."""
    text = str(name)
    if text.startswith(PRETRAINED):
        return Run(PRETRAINED_FOLDER / lookup(pretrained_runs(), text.removeprefix(PRETRAINED), "pretrained"))
    folder, at, which = text.rpartition("@")
    if at and (which == BEST or which.isdecimal()) and not Path(text).exists():
        return Run(folder, BEST if which == BEST else int(which))
    return Run(name)


def pretrained_runs() -> dict[str, str]:
    """The folders of the small trained models that come with the package, by name."""
    return {path.parent.name: path.parent.name for path in sorted(PRETRAINED_FOLDER.glob(f"*/{RECIPE}"))}


def load_run(folder: Path | str) -> Run:
    """The run of a name: its ``recipe``, ``task``, ``model``, ``results`` and ``metrics()``.

    Args:
        folder: the run's folder; FOLDER@best for the checkpoint that validation found best, FOLDER@STEP for that of a
            step, or pretrained:NAME for a model that comes with the package.

    Raises a ValueError unless the folder holds one that this version can read.
    """
    run = find_run(folder)
    _ = run.recipe
    return run

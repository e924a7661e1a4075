"""The fields of a recipe, and how it is stored with a run."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Literal

from tra import plugins
from tra.attention.naming import plugins_of
from tra.lookup import lookup
from tra.model import DecoderConfig
from tra.signatures import LONGEST, MOST, among, check_count, check_types, format_value
from tra.tasks import TASKS, Evaluation, Task, build_task, task_options

COUNTS = (
    "steps",
    "batch",
    "accumulate",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "validate_every",
    "patience",
)
VALIDATION = re.compile(r"(?P<name>[^@:]+)(@(?P<length>[0-9]{1,18})(:(?P<examples>[0-9]{1,18}))?)?")
LONGEST_NAME = 150
"""Of a folder: file systems allow 255 bytes."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run: the same recipe gives the same weights."""

    name: str = field(compare=False)
    """What the run is called."""
    model: DecoderConfig
    task: str
    """Name of the task; "text" for language modelling."""
    length: int
    """Length of training sequences, in the task's unit; string tasks mix all lengths up to this one."""
    steps: int
    batch: int
    """Sequences per step, over all processes."""
    learning_rate: float
    task_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Options of the task, such as the alphabet of a string task, or which text and which tokenizer."""
    seed: int = 0
    data: str = "fresh"
    """Where training sequences come from: "fresh" makes new ones at every step, "fixed" makes a number of `examples`
    once, "hub" reads the copy that the task's authors published, and anything else is a folder that holds it."""
    examples: int | None = None
    """Number of sequences when data is "fixed"."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises linearly."""
    warmup_steps: int | None = None
    """Warm-up in steps, instead of a share."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """The learning rate after the warm-up. "cosine" falls to zero, "constant" stays, and "wsd" (warm-up, stable, decay)
    stays and falls linearly over the last steps. A run with one of the last two can be extended."""
    decay: float = 0.2
    """Share of the steps over which the learning rate falls when the schedule is "wsd"."""
    init_from: str | None = None
    """Begin with the weights of another model: a run, RUN@best, pretrained:NAME, or a folder that tra export wrote. By
    default weights are drawn from the seed."""
    beta2: float = 0.999
    """AdamW's second beta; 0.95 makes short runs much steadier."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient."""
    accumulate: int = 1
    """Gradient accumulation: pieces into which a process divides its part of the batch, to save memory."""
    precision: Literal["no", "bf16"] = "no"
    """Mixed precision."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations, to save memory."""
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    evaluations: tuple[Evaluation, ...] = field(default=(), metadata={"hidden": True})
    """Measured after the last step."""
    validate_every: int | None = None
    """Measure the validation sets every this many steps and after the last one, and keep the best checkpoint."""
    validation: tuple[str, ...] = ()
    """Sets to validate on: NAME, NAME@LENGTH or NAME@LENGTH:EXAMPLES, such as iid or sparse@256. By default the
    recipe's sets within the training length."""
    watch: str = "loss"
    """The measure, averaged over the validation sets, that decides which checkpoint is best: loss, or exact_match,
    token_accuracy, perplexity, depending on the task."""
    patience: int | None = None
    """Stop early after this many validations in a row without a new best."""

    def __post_init__(self) -> None:
        task = self.build_task()
        object.__setattr__(self, "task_options", dict(self.task_options))
        object.__setattr__(self, "validation", tuple(self.validation))
        check_types(self, but=("evaluations",))
        if not all(isinstance(entry, Evaluation) for entry in self.evaluations):
            raise ValueError(f"evaluations must each be an Evaluation, got {self.evaluations!r}")
        check_count("length", self.length, LONGEST)
        for name in COUNTS:
            check_count(name, getattr(self, name), MOST)
        if self.warmup_steps is not None and not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps must be between 0 and the {self.steps} steps, got {self.warmup_steps}")
        if self.patience is not None and self.validate_every is None:
            raise ValueError(f"patience must be given with validate_every, got {self.patience} without it")
        if self.validate_every is not None:
            lookup(dict.fromkeys(task.measure.measure_names()), self.watch, "watch")
        self.validation_sets(task)
        for name in ("warmup", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be a share of the steps in [0, 1], got {getattr(self, name)!r}")
        if not 0.0 <= self.beta2 < 1.0:
            raise ValueError(f"beta2 must be in [0, 1), got {self.beta2!r}")
        if not 0.0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate!r}")
        if not self.weight_decay >= 0.0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay!r}")
        if not self.clip > 0.0:
            raise ValueError(f"clip must be positive, got {self.clip!r}")
        if self.data == "fixed" and (self.examples is None or self.examples < self.batch):
            raise ValueError(f"examples must be at least the batch of {self.batch} for fixed data, got {self.examples}")
        task.check(self.model.vocabulary, self.length, self.evaluations)

    def build_task(self) -> Task:
        """The task to train on and be measured on. A text is not read before it is needed."""
        return build_task(self.task, self.task_options)

    def folder_name(self, usual: "Recipe | None" = None) -> str:
        """Default name of the run's folder: recipe, mechanism, what differs from the usual recipe, and the seed.

        Example:
            >>> from tra.recipes import build_recipe
            >>> usual = build_recipe("flip-flop-small")
            >>> usual.changed({"steps": 200, "model.width": 64}).folder_name(usual)
            'flip-flop-small-tra-steps=200-width=64-0'
        """
        words = [self.name, *self.model.label.split(" ")]
        for name, (before, now) in {} if usual is None else usual.differences(self).items():
            if name == "task_options":
                words += [f"{key}={now[key]}" for key in now if now[key] != before.get(key)]
            elif name not in ("seed", "evaluations", "model.attention", "model.attention_options"):
                shown = "+".join(now) if isinstance(now, tuple) else format_value(now)
                words.append(f"{name.removeprefix('model.')}={shown}")
        words.append(str(self.seed))
        whole = "-".join("".join(sign if sign.isalnum() or sign in "-+_.=" else "-" for sign in word) for word in words)
        if len(whole) <= LONGEST_NAME:
            return whole
        digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
        return f"{whole[: LONGEST_NAME - 10].rstrip('-')}-{digest}-{self.seed}"

    @property
    def warmup_length(self) -> float:
        """Steps over which the learning rate rises. The cosine's need not be a whole number."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        share = self.warmup * self.steps
        return share if self.schedule == "cosine" else round(share)

    @property
    def stable_steps(self) -> int:
        """Steps that do not depend on how many there are in all: a longer run begins with the same ones."""
        if self.schedule == "cosine":
            return 0
        return self.steps if self.schedule == "constant" else self.steps - round(self.decay * self.steps)

    def extended(self, steps: int) -> "Recipe":
        """The same run with more steps, as if it had been planned so. Its warm-up stays what it was.

        Example:
            >>> from tra.recipes import build_recipe
            >>> recipe = build_recipe("flip-flop-small").changed({"schedule": "constant"})
            >>> recipe.extended(900).warmup_steps == round(0.05 * 600)
            True
        """
        if self.schedule == "cosine":
            raise ValueError(
                "schedule must be 'constant' or 'wsd' for a run to be extended: with 'cosine' every step depends on "
                "how many there are"
            )
        if steps <= self.steps:
            raise ValueError(f"steps must be more than the {self.steps} of the run to extend it, got {steps}")
        return replace(self, steps=steps, warmup_steps=int(self.warmup_length))

    def validation_sets(self, task: Task) -> list[Evaluation]:
        """What `validation` names; a ValueError says what is wrong with it."""
        within = [entry for entry in self.evaluations if entry.length <= self.length] or list(self.evaluations[:1])
        if not self.validation:
            if self.validate_every is not None and not within:
                raise ValueError("validation must name sets to validate on: the recipe has no evaluations")
            return within if self.validate_every is not None else []
        found = []
        for text in self.validation:
            match = VALIDATION.fullmatch(text)
            if match is None:
                raise ValueError(f"validation must be NAME, NAME@LENGTH or NAME@LENGTH:EXAMPLES, got {text!r}")
            name, length = match["name"], int(match["length"] or self.length)
            lookup(task.evaluation_sets(), name, "validation")
            usual = task.usual_examples(self.evaluations, name, length)
            found.append(Evaluation(name, length, int(match["examples"]) if match["examples"] else usual))
        task.check(self.model.vocabulary, self.length, found)
        return found

    @property
    def plugins(self) -> list[str]:
        """The plug-ins that its names come from."""
        of_task = plugins.source("TASKS", self.task)
        return sorted({*plugins_of(self.model.attention), *([] if of_task is None else [of_task])})

    def changed(self, changes: Mapping[str, Any]) -> "Recipe":
        """The recipe with other values of some fields. Names reach into the model (``model.width``) and into options
        (``task_options.alphabet``, ``model.attention_options.theta``).

        Example:
            >>> from tra.recipes import build_recipe
            >>> build_recipe("copy-repeat-small").changed({"task_options.alphabet": 20, "model.layers": 2}).task_options
            {'alphabet': 20}
        """
        return self._replaced(self._resolved(changes, self.task_options))

    def adjusted(self, changes: Mapping[str, Any]) -> "Recipe":
        """As ``changed``, for changes that a user asks for: the evaluations stay at as many times the training length,
        and another task keeps those options of this one that it has.

        Example:
            >>> from tra.recipes import build_recipe
            >>> [entry.length for entry in build_recipe("copy-unique-small").adjusted({"length": 5}).evaluations]
            [5, 10, 15, 20]
        """
        name = changes.get("task", self.task)
        known = task_options(plugins.find("TASKS", TASKS, name, "task"))
        kept = {option: value for option, value in self.task_options.items() if name == self.task or option in known}
        values = {"task_options": kept, **self._resolved(changes, kept)}
        length = values.get("length", self.length)
        if "evaluations" not in values and isinstance(length, int):
            task, factor = build_task(name, values["task_options"]), Fraction(length, self.length)
            values["evaluations"] = tuple(task.rescaled(entry, factor) for entry in self.evaluations)
        return self._replaced(values)

    def _resolved(self, changes: Mapping[str, Any], of_task: Mapping[str, Any]) -> dict[str, Any]:
        """Changes with single options put among the others: among ``of_task``, and those of the mechanism."""
        known = [*(entry.name for entry in fields(Recipe)), *(f"model.{entry.name}" for entry in fields(DecoderConfig))]
        values: dict[str, Any] = {}
        for name, value in changes.items():
            where, _, option = name.rpartition(".")
            if where in OPTIONS:
                options = values.get(where, of_task if where == "task_options" else self.model.attention_options)
                values[where] = {**options, option: value}
            elif name in known:
                values[name] = value
            else:
                raise ValueError(among("a field of a recipe", known, name))
        return values

    def _replaced(self, values: Mapping[str, Any]) -> "Recipe":
        of_model = {name.removeprefix("model."): value for name, value in values.items() if name.startswith("model.")}
        own = {name: value for name, value in values.items() if not name.startswith("model.")}
        return replace(self, model=replace(self.model, **of_model), **own)

    def differences(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """The fields in which two recipes differ, with the values of both; fields of the model by themselves."""
        flat = [
            {**{name: getattr(x, name) for name in _COMPARED}, **{f"model.{k}": v for k, v in asdict(x.model).items()}}
            for x in (self, other)
        ]
        return {name: (flat[0][name], flat[1][name]) for name in flat[0] if flat[0][name] != flat[1][name]}

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "plugins": self.plugins}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """What `to_json` gave, of this version or of 0.1, in which a text and an alphabet had fields of their own."""
        stored: dict[str, Any] = json.loads(text)
        if not isinstance(stored, dict):
            raise ValueError(f"it must hold the fields of a recipe, got {type(stored).__name__}")
        plugins.require(stored.pop("plugins", []))
        alphabet, source = stored.pop("alphabet", None), stored.pop("text", None)
        if alphabet is not None:
            stored["task_options"] = {"alphabet": alphabet}
        if source is not None:  # whose evaluation text was None where none was named
            stored["task_options"] = {name: value for name, value in source.items() if value is not None}
        stored["model"] = DecoderConfig.from_dict(stored["model"])
        stored["evaluations"] = tuple(Evaluation(**entry) for entry in stored["evaluations"])
        if not isinstance(stored.get("validation", []), list):
            raise ValueError(f"validation must be a list of names, got {stored['validation']!r}")
        return cls(**stored)


OPTIONS = ("task_options", "model.attention_options")
"""Fields of which a single entry may be changed."""

_COMPARED = [entry.name for entry in fields(Recipe) if entry.compare and entry.name != "model"]

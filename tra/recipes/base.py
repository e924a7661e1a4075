"""What a recipe says, and how it is stored with a run."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from typing import Annotated, Any, Literal, get_type_hints

from tra import plugins
from tra.attention.naming import plugins_of
from tra.errors import not_installed
from tra.model import DecoderConfig
from tra.signatures import LONGEST, MOST, among, mismatch
from tra.tasks import Evaluation, Task, build_task

try:
    import tyro
except ModuleNotFoundError as error:  # the first that is missed by whoever has torch alone
    raise not_installed(error) from None

COUNTS = ("length", "steps", "batch", "accumulate", "log_every", "checkpoint_every", "keep_checkpoints")


@dataclass(frozen=True)
class Recipe:
    """A run, completely: the same recipe gives the same weights."""

    name: str = field(compare=False)
    """What the run is called."""
    model: DecoderConfig
    task: str
    """Name of the task to train on; "text" for language modelling."""
    length: int
    """Of training sequences, in the task's unit; string tasks mix all lengths up to this one."""
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
    """Share of the steps over which the learning rate rises linearly; a cosine to zero follows."""
    beta2: float = 0.999
    """How slowly AdamW's estimate of the gradient's size changes; 0.95 makes short runs much steadier."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient."""
    accumulate: int = 1
    """Pieces into which a process divides its part of the batch, to save memory."""
    precision: Literal["no", "bf16"] = "no"
    """Mixed precision."""
    gradient_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping what it computed, to save memory."""
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    evaluations: Annotated[tuple[Evaluation, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """Measured after the last step."""

    def __post_init__(self) -> None:
        task = self.build_task()
        object.__setattr__(self, "task_options", dict(self.task_options))
        for name, annotation in get_type_hints(Recipe).items():
            wrong = mismatch(getattr(self, name), annotation) if name != "evaluations" else None
            if wrong is not None:
                raise ValueError(f"{name} must be {wrong}")
        if not all(isinstance(entry, Evaluation) for entry in self.evaluations):
            raise ValueError(f"evaluations must each be an Evaluation, got {self.evaluations!r}")
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
            most = LONGEST if name == "length" else MOST
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most:,}, got {getattr(self, name):,}")
        if not 0.0 <= self.warmup <= 1.0:
            raise ValueError(f"warmup must be a share of the steps in [0, 1], got {self.warmup!r}")
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

    @property
    def folder_name(self) -> str:
        """What its run's folder is called when nobody says: other recipes, mechanisms and seeds have other ones."""
        return f"{self.name}-{self.model.label.replace(' ', '-')}-{self.seed}"

    @property
    def plugins(self) -> list[str]:
        """The plug-ins that its names come from."""
        of_task = plugins.source("TASKS", self.task)
        return sorted({*plugins_of(self.model.attention), *([] if of_task is None else [of_task])})

    def measured_like(self, other: "Recipe") -> "Recipe":
        """With the evaluations of a recipe of another training length, at as many times this one's."""
        return replace(self, evaluations=self.rescaled_evaluations(other))

    def rescaled_evaluations(self, other: "Recipe") -> tuple[Evaluation, ...]:
        """Those of a recipe of another training length, at as many times this one's."""
        task, factor = self.build_task(), Fraction(self.length, other.length)
        return tuple(task.rescaled(entry, factor) for entry in other.evaluations)

    def changed(self, changes: Mapping[str, Any]) -> "Recipe":
        """The recipe with other values of fields; those of the model have names such as ``model.width``, and single
        options such as ``task_options.alphabet`` and ``model.attention_options.theta``.

        Example:
            >>> from tra.recipes import build_recipe
            >>> build_recipe("copy-repeat-small").changed({"task_options.alphabet": 20, "model.layers": 2}).task_options
            {'alphabet': 20}
        """
        known = [*(entry.name for entry in fields(Recipe)), *(f"model.{entry.name}" for entry in fields(DecoderConfig))]
        values: dict[str, Any] = {}
        for name, value in changes.items():
            where, _, option = name.rpartition(".")
            if where in OPTIONS:
                options = values.get(
                    where, self.task_options if where == "task_options" else self.model.attention_options
                )
                values[where] = {**options, option: value}
            elif name in known:
                values[name] = value
            else:
                raise ValueError(among("a field of a recipe", known, name))
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
        return cls(**stored)


OPTIONS = ("task_options", "model.attention_options")
"""Fields of which a single entry may be changed."""

_COMPARED = [entry.name for entry in fields(Recipe) if entry.compare and entry.name != "model"]

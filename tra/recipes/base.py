"""What a recipe says, and how it is stored with a run."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
import tyro

from tra.lookup import lookup
from tra.model import DecoderConfig
from tra.tasks import TASKS, Task
from tra.tasks.strings import StringTask


@dataclass(frozen=True)
class Evaluation:
    """One named, fixed set of sequences of one length."""

    name: str
    length: int
    """In the task's unit: tokens, or symbols of the string."""
    examples: int


@dataclass(frozen=True)
class Recipe:
    """A run, completely: the same recipe gives the same weights."""

    name: str
    """What the run is called."""
    model: DecoderConfig
    task: str
    """Name of the task to train on."""
    length: int
    """Of training sequences, in the task's unit; string tasks mix all lengths up to this one."""
    steps: int
    batch: int
    """Sequences per step, over all processes."""
    learning_rate: float
    seed: int = 0
    alphabet: int | None = None
    """Number of symbols of a string task; the task's own by default."""
    data: str = "fresh"
    """Where training sequences come from: "fresh" draws new ones at every step, "fixed" draws a set of `examples`
    once, "hub" reads the copy that the task's authors published, and anything else is a folder that holds it."""
    examples: int | None = None
    """Size of the set when data is "fixed"."""
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
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    evaluations: Annotated[tuple[Evaluation, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """Measured after the last step."""

    def __post_init__(self) -> None:
        for name in ("length", "steps", "batch", "accumulate", "log_every", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.warmup <= 1.0:
            raise ValueError(f"warmup must be a share of the steps in [0, 1], got {self.warmup!r}")
        if not 0.0 <= self.beta2 < 1.0:
            raise ValueError(f"beta2 must be in [0, 1), got {self.beta2!r}")
        if not 0.0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate!r}")
        if not self.clip > 0.0:
            raise ValueError(f"clip must be positive, got {self.clip!r}")
        if self.data == "fixed" and (self.examples is None or self.examples < self.batch):
            raise ValueError(f"examples must be at least the batch of {self.batch} for fixed data, got {self.examples}")
        task = self.build_task()
        if self.model.vocabulary < len(task.symbols):
            raise ValueError(
                f"model.vocabulary must be at least {len(task.symbols)} for {self.task}, got {self.model.vocabulary}"
            )
        # One sequence of each length, so that a length the task cannot have is refused now and not after training.
        task.sample(torch.Generator(), 1, self.length)
        for entry in self.evaluations:
            lookup(task.evaluation_sets(), entry.name, "evaluation set").sample(torch.Generator(), 1, entry.length)

    def build_task(self) -> Task:
        """The task to train on and be measured on."""
        task = lookup(TASKS, self.task, "task")
        if self.alphabet is None:
            return task
        if not isinstance(task, StringTask):
            raise ValueError(f"alphabet must be None for {self.task}, got {self.alphabet}")
        return replace(task, alphabet=self.alphabet)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        fields: dict[str, Any] = json.loads(text)
        fields["model"] = DecoderConfig(**fields["model"])
        fields["evaluations"] = tuple(Evaluation(**entry) for entry in fields["evaluations"])
        return cls(**fields)

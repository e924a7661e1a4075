"""What a recipe says, and how it is stored with a run."""

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro

from tra.lookup import lookup
from tra.model import DecoderConfig
from tra.tasks import TASKS, Task
from tra.tasks.strings import StringTask

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Evaluation:
    """One named, fixed set of sequences of one length."""

    name: str
    length: int
    """In the task's unit: tokens, or symbols of the string."""
    examples: int | None
    """Sequences; of a text None means all of it."""
    stride: int | None = None
    """Of a text: how far windows move on; by default they lie side by side."""


@dataclass(frozen=True)
class TextData:
    """Which text a language model is trained and measured on."""

    train: str = "wikitext-103"
    """wikitext-103 or wikitext-2 (looked for in the folder $TRA_DATA, then on the hub), or a folder of text files."""
    evaluation: str | None = None
    """The text to be measured on; that to train on by default."""
    tokenizer: str = "gpt2"
    """gpt2, a folder that holds a tokenizer, or bpe-N: a byte-level BPE of N tokens trained on the training text."""


@dataclass(frozen=True)
class Recipe:
    """A run, completely: the same recipe gives the same weights."""

    name: str
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
    seed: int = 0
    text: Annotated[TextData | None, tyro.conf.AvoidSubcommands] = None
    """What to read, where the task is text."""
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
    gradient_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping what it computed, to save memory."""
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
        if (self.task == "text") != (self.text is not None):
            raise ValueError(f"text must be given for the task text and for no other, got {self.text} for {self.task}")
        if self.text is None:
            self.check_task()
        elif self.data != "fresh" or self.alphabet is not None:
            raise ValueError(f"data and alphabet must be left alone for text, got {self.data!r} and {self.alphabet}")

    def check_task(self, console: "Console | None" = None) -> None:
        """Refuse now, not after training, what the task cannot have. Reads the text, where the task is one."""
        task = self.build_task(console)
        if self.model.vocabulary < task.vocabulary:
            raise ValueError(
                f"model.vocabulary must be at least {task.vocabulary} for {self.task}, got {self.model.vocabulary}"
            )
        task.sample(torch.Generator(), 1, self.length)
        for entry in self.evaluations:
            next(task.evaluation_batches(entry.name, entry.length, entry.examples, 1, entry.stride))

    def build_task(self, console: "Console | None" = None) -> Task:
        """The task to train on and be measured on. A text is not read before it is needed; the console shows that."""
        if self.text is not None:
            from tra.text import Text

            return Text(self.text.train, self.text.evaluation, self.text.tokenizer, console)
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
        if fields.get("text") is not None:
            fields["text"] = TextData(**fields["text"])
        fields["evaluations"] = tuple(Evaluation(**entry) for entry in fields["evaluations"])
        return cls(**fields)

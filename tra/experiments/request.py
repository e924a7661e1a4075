"""What is asked of an experiment: one object for the command, for Python and for clusters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tra.experiments.cells import file_name
from tra.experiments.rows import settings_words
from tra.lookup import lookup
from tra.report.figures import FORMATS, styled


class Shard(NamedTuple):
    """A machine's part of the runs, of how many."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @classmethod
    def from_text(cls, text: str) -> "Shard":
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal()):
            raise ValueError(f"must be i/n with 1 <= i <= n, got {text!r}")
        return cls(int(number), int(of))


WHOLE = Shard(1, 1)
CLUSTERS = ("slurm", "local")


@dataclass(frozen=True)
class Request:
    """What is asked of an experiment, besides what it says itself. The command has an option for each field."""

    folder: Path | None = field(default=None, metadata={"option": "output"})
    """Folder to work in; runs/NAME-SCALE by default, with what --set and --steps change."""
    scale: str | None = None
    """smoke (seconds), small (two cores, hours) or paper (GPUs), or a scale of your file; small by default."""
    seeds: int | None = None
    """Number of seeds (0, 1, ...) of each row and column; the experiment's by default."""
    attention: tuple[str, ...] = ()
    """Rows or mechanisms; all of the experiment by default."""
    columns: tuple[str, ...] = ()
    """Columns (for most experiments, tasks) to run and show; all of the experiment by default."""
    steps: int | None = None
    """Steps of every run, instead of the recipe's: short for --set steps=N."""
    set: dict[str, Any] = field(default_factory=dict)
    """Fields to change in every recipe, e.g. batch=16 model.width=64 task_options.alphabet=20."""
    jobs: int = 1
    """Runs in parallel, each with its share of the threads (or a GPU of its own)."""
    shard: Shard = WHOLE
    """This machine's share of the runs, e.g. 2/3, if several machines share the folder."""
    train: bool = True
    """--no-train makes tables and figures from what is stored, without training."""
    figures: tuple[str, ...] = ("png",)
    """Formats of figures: png, svg, pdf."""
    style: str | None = None
    """A style sheet of matplotlib, by name or path."""
    join: tuple[Path, ...] = ()
    """results.json files of the same experiment, or of one that shares columns, from machines that do not share the
    folder. Their results are added; what was tuned and run there is not repeated."""
    cluster: str | None = None
    """Submit every run as a job through submitit: slurm, or local to try it."""
    cluster_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the cluster, e.g. partition=gpu,gpus_per_node=1,timeout_min=600."""
    command: str = field(default="", metadata={"hidden": True})
    """What to write down as the way to repeat it."""

    def __post_init__(self) -> None:
        for name, value in {
            "folder": None if self.folder is None else Path(self.folder),
            "attention": _several(self.attention),
            "columns": _several(self.columns),
            "figures": _several(self.figures),
            "join": tuple(map(Path, _several(self.join))),
            "shard": Shard(*self.shard),
            "cluster_options": dict(self.cluster_options),
            "set": dict(self.set),
        }.items():
            object.__setattr__(self, name, value)
        if self.steps is not None and self.set.get("steps", self.steps) != self.steps:
            raise ValueError(f"steps must be given once, got {self.steps} and {self.set['steps']}")
        if "seed" in self.set:
            raise ValueError("set must leave the seed alone: seeds says how many there are")
        for name in ("seeds", "jobs", "steps"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if not 1 <= self.shard.number <= self.shard.of:
            raise ValueError(f"shard must be i/n with 1 <= i <= n, got {self.shard}")
        if self.folder is not None and self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"output must be a folder, but {self.folder} is a file")
        for kind in self.figures:
            lookup(dict.fromkeys(FORMATS), kind, "figures")
        if self.cluster is not None:
            lookup(dict.fromkeys(CLUSTERS), self.cluster, "cluster")
        with styled(self.style):
            pass  # a wrong one is found before anything is trained

    def for_experiment(self, name: str | None, usual_scale: str) -> "Request":
        """The same with the scale, and the folder of an experiment that has a name, where they were left open."""
        scale = self.scale or usual_scale
        if self.folder is not None or name is None:
            return replace(self, scale=scale)
        folder = Path("runs") / file_name("-".join([name, scale, *settings_words(self.changes)]))
        return replace(self, scale=scale, folder=folder)

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that every recipe has in place of its own."""
        return {**self.set, **({} if self.steps is None else {"steps": self.steps})}


def _several(values: Any) -> tuple[Any, ...]:
    """One or many, as callers from Python may write them."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, (str, Mapping)) else (values,)

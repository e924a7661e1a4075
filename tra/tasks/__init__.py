"""What to learn: one file per synthetic task, vectorised and reproducible from a generator alone, and text."""

from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from tra import plugins
from tra.signatures import Option, checked_options, options_in
from tra.tasks.base import Batch, ReadsText, Task
from tra.tasks.copy import CopyRepeat, CopyUnique
from tra.tasks.flip_flop import FlipFlop
from tra.tasks.induct import InductOnce, InductRecent
from tra.tasks.instructed import Instructed
from tra.tasks.majority import Majority
from tra.tasks.measures import Evaluation, ExactMatch, Perplexity, Prediction, Result
from tra.tasks.mqmtar import MultiTokenRecall
from tra.tasks.n_back import NBack
from tra.tasks.parity import Parity
from tra.tasks.passkey import Passkey
from tra.tasks.recall import Recall
from tra.tasks.reverse import Reverse
from tra.tasks.sort import Sort
from tra.tasks.word_problem import WordProblem


def text(train: str = "wikitext-103", evaluation: str | None = None, tokenizer: str = "gpt2") -> Task:
    """Language modelling: predict the next token of real text."""
    from tra.text import Text  # needs the hub's libraries

    return Text(train, evaluation, tokenizer)


TASKS: dict[str, Callable[..., Task]] = {
    **{
        task.name: task
        for task in (
            FlipFlop,
            CopyUnique,
            CopyRepeat,
            InductOnce,
            InductRecent,
            Instructed,
            Reverse,
            Sort,
            Parity,
            Majority,
            WordProblem,
            NBack,
            Passkey,
            Recall,
            MultiTokenRecall,
        )
    },
    "text": text,
}
"""Every task by name: a class, or a function, whose arguments are the task's options."""


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """The task of a name with these options.

    Example:
        >>> build_task("copy_unique", {"alphabet": 40}).vocabulary
        44
    """
    make = plugins.find("TASKS", TASKS, name, "task")
    return make(**checked_options(task_options(make), options or {}, "task_options", name))


def task_options(make: Callable[..., Task]) -> dict[str, Option]:
    """The options of a task, given its class or function."""
    return options_in(make, (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY))


__all__ = [
    "TASKS",
    "Batch",
    "CopyRepeat",
    "CopyUnique",
    "Evaluation",
    "ExactMatch",
    "FlipFlop",
    "InductOnce",
    "InductRecent",
    "Instructed",
    "Majority",
    "MultiTokenRecall",
    "NBack",
    "Parity",
    "Passkey",
    "Perplexity",
    "Prediction",
    "ReadsText",
    "Recall",
    "Result",
    "Reverse",
    "Sort",
    "Task",
    "WordProblem",
    "build_task",
    "task_options",
]

"""`tra evaluate`."""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tra.cli.parsing import Common, on_console, parse


@dataclass(frozen=True)
class Evaluate(Common):
    """Evaluate a trained run on named, fixed sets: full-sequence exact match, or the perplexity of text.

    Results on the recipe's own sets are stored with the run.
    """

    run: Path = field(metadata={"positional": "RUN"})
    """Run: its folder, FOLDER@best, FOLDER@STEP or pretrained:NAME."""
    sets: tuple[str, ...] = ()
    """Names of evaluation sets; the recipe's by default."""
    lengths: tuple[int, ...] = ()
    """Lengths in the task's unit (for text: windows in tokens); the recipe's by default."""
    examples: int | None = None
    """Sequences per set; the recipe's number by default, else 100. For text: windows; by default every length reads as
    many tokens as in the recipe."""
    stride: int | None = None
    """For text: windows overlap and move on by this many tokens; by default they lie side by side."""
    data: str | None = None
    """Evaluate on the published copy of the task instead of generated sets: "hub", or a folder that holds it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the mechanism to change for the evaluation, e.g. scaling=yarn factor=8 trained_length=128."""
    context_parallel: int = 1
    """Number of processes, started by torchrun, that share each sequence."""
    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    options = parse(Evaluate, arguments, "evaluate")
    from tra.environment import environment
    from tra.report.tables import results_table
    from tra.runs import evaluate, load_run
    from tra.runs.distributed import process_group

    found = load_run(options.run)
    given = (options.sets, options.lengths, options.examples is not None, options.data, options.stride, options.options)
    asked = any(given)
    trained = found.recipe.model
    label = replace(trained, attention_options={**trained.attention_options, **options.options}).label
    with on_console(quiet=options.json), process_group() as first:
        found.model  # noqa: B018  says at once if there is none
        step, steps = found.step, found.recipe.steps
        if step < found.last_step() and found.at is None and first:
            print(f"tra: warning: the run is at step {step} of {steps}", file=sys.stderr)
        results = evaluate(
            found,
            sets=options.sets,
            lengths=options.lengths,
            examples=options.examples,
            stride=options.stride,
            data=options.data,
            options=options.options,
            context_parallel=options.context_parallel,
        )
    if not first:
        return 0
    if not asked and found.at is None and not found.is_pretrained:
        found.store_results(step, found.task, results)
    if options.json:
        content = {"step": step, "environment": environment(), "results": [result.to_dict() for result in results]}
        print(json.dumps(content, indent=2))
    else:
        print(results_table(label, results, found.task.unit), end="")
    return 0

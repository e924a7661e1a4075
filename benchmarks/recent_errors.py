"""Where errors lie on the most recent occurrence: what is said in place of what followed the last occurrence.

    python benchmarks/recent_errors.py RUN [RUN ...] [--examples 1024] [--json FILE]

Of each run of `induct-recent-small`, at the lengths of its evaluations: the share of answers that are right, that
follow an older occurrence of the same symbol, that stand elsewhere in the string, and that do not occur in it. Then the
share of right answers by how far back the last occurrence lies.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from tra.runs import load_run
from tra.tasks import InductRecent
from tra.tasks.strings import BOS, SEP

KINDS = ("right", "after an older occurrence", "elsewhere in the string", "not in the string")
BACK = (4, 8, 16, 32, 64)
"""How many symbols back the last occurrence lies, at most."""


def kinds_of(string: Tensor, asked: Tensor, answer: Tensor, said: Tensor) -> list[Tensor]:
    """For each kind of answer which rows have it, of strings ``[B, L]`` and what was asked, right and said ``[B]``."""
    older = ((string[:, :-1] == asked[:, None]) & (string[:, 1:] == said[:, None])).any(dim=1)
    within = (string == said[:, None]).any(dim=1)
    right = said == answer
    return [right, ~right & older, ~right & ~older & within, ~right & ~older & ~within]


@torch.inference_mode()
def errors_of(folder: Path, examples: int) -> dict[str, dict[str, dict[str, float]]]:
    """By length, the share of each kind; and by how far back the last occurrence lies, the share that is right."""
    run = load_run(folder)
    task = run.task
    if not isinstance(task, InductRecent):
        raise SystemExit(f"{folder} must be a run of induct_recent, got {run.recipe.task}")
    shares: dict[str, dict[str, float]] = {}
    far: dict[str, list[bool]] = {}
    for length in sorted({entry.length for entry in run.recipe.evaluations}):
        rng = torch.Generator().manual_seed(length)
        batch = task.evaluation_sets()["induct"].sample(rng, examples, length)
        place = batch.counted.long().argmax(dim=1)  # of the answer, behind the separator and the symbol asked for
        rows = torch.arange(examples)
        logits = run.model(batch.tokens[:, :-1])
        said = logits[rows, place - 1].argmax(dim=-1)
        assert (batch.tokens[:, 0] == BOS).all()
        assert (batch.tokens[rows, place - 2] == SEP).all()
        string, asked = batch.tokens[:, 1 : length + 1], batch.tokens[rows, place - 1]
        kinds = kinds_of(string, asked, batch.tokens[rows, place], said)
        shares[str(length)] = {name: kind.float().mean().item() for name, kind in zip(KINDS, kinds, strict=True)}
        back = length - torch.where(string == asked[:, None], torch.arange(length), -1)[:, :-1].amax(dim=1)
        for most, least in zip(BACK, (0, *BACK), strict=False):
            among = (back > least) & (back <= most)
            far.setdefault(f"{least + 1} to {most}", []).extend(kinds[0][among].tolist())
    return {
        "kinds": shares,
        "back": {name: {"right": sum(x) / len(x), "number": len(x)} for name, x in far.items() if x},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--examples", type=int, default=1024, help="sequences at each length")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    given = parser.parse_args()
    found = {}
    for folder in given.runs:
        label = f"{load_run(folder).recipe.model.label}, seed {load_run(folder).recipe.seed}"
        found[label] = errors_of(folder, given.examples)
        print(f"\n{label}\n\n| length | {' | '.join(KINDS)} |\n|---|{'---:|' * len(KINDS)}")
        for length, shares in found[label]["kinds"].items():
            print(f"| {length} | {' | '.join(f'{share:.3f}' for share in shares.values())} |")
        print("last occurrence so far back:", {k: round(v["right"], 3) for k, v in found[label]["back"].items()})
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

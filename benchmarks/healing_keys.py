"""What long context is used for: an adopted model finds a key in noise beyond the length that it was trained at.

    python benchmarks/healing_keys.py --work WORK [--seeds 3] [--steps 0 200]
    python benchmarks/healing_keys.py --work WORK --table FOLDER

A Llama of the size of `benchmarks/healing.py` learns the task passkey with RoPE: a key of three digits stands anywhere
among noise and is asked for at the end. The settings of that file change it, and it is trained for some more steps.
Nothing longer than 128 tokens is ever trained on; measured is how many of the three digits are right in longer texts.
Measurements are stored in WORK/keys.jsonl, and what is there already is not done again.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from healing import PRETRAINING_RATE, SETTINGS, WINDOW, groups, interval, new_llama, tra, train
from torch import Tensor

from tra.environment import environment
from tra.tasks import Evaluation, Passkey

OWN = {
    "TRA, threshold 0": partial(tra, threshold=0.0),
    "TRA, threshold 0, positions dropped": partial(tra, threshold=0.0, drop_positions=True),
}
"""What may forget less than the defaults."""
TASK = Passkey()
BATCH, PRETRAINING, SHORTEST = 16, 1000, 16
LENGTHS = {128: 256, 512: 128, 1024: 64, 4096: 32}
"""How many texts are read at each length."""
AT_ONCE = 16384
"""Tokens."""


def batch_of(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts of one length up to a training window; only the key at the end is labelled."""
    length = int(torch.randint(SHORTEST, WINDOW + 1, (), generator=generator))
    batch = TASK.sample(generator, BATCH, length)
    return batch.tokens, batch.tokens.masked_fill(~batch.counted, -100)


def pretrained(seed: int, work: Path) -> Any:
    folder = work / f"keys-{seed}"
    if not (folder / "model.safetensors").exists():
        model = new_llama(seed, TASK.vocabulary)
        train(model, batch_of, PRETRAINING, seed, PRETRAINING_RATE)
        model.save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder)


@torch.no_grad()
def accuracy(model: Any, length: int) -> float:
    """The share of digits that are the most probable token."""
    right = []
    for batch in TASK.evaluation_batches(Evaluation("passkey", length, LENGTHS[length]), AT_ONCE // length):
        tokens, counted = batch.tokens.long(), batch.counted[:, 1:]
        found = model(tokens, use_cache=False).logits[:, :-1].argmax(-1)
        right.append((found == tokens[:, 1:])[counted])
    return torch.cat(right).float().mean().item()


def measured(work: Path) -> list[dict[str, Any]]:
    path = work / "keys.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: the percentage of digits that are right, means over seeds with 95% intervals."""
    titles = " | ".join(f"{length:,}" for length in LENGTHS)
    lines = [f"| setting | steps | {titles} | seeds |", "|---|---:|" + "---:|" * (len(LENGTHS) + 1)]
    for name, steps, rows in groups(results):
        cells = [interval("accuracy", [row["accuracy"][str(length)] for row in rows]) for length in LENGTHS]
        lines.append(f"| {name} | {steps:,} | {' | '.join(cells)} | {len(rows)} |")
    return "\n".join(lines) + "\n"


def store(work: Path, folder: Path) -> None:
    rows = measured(work)
    stored = {"environment": environment(), "results": rows}
    (folder / "keys.json").write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    (folder / "keys.md").write_text(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 200], help="of training after the change")
    parser.add_argument("--table", type=Path, help="write keys.json and keys.md to this folder, and train nothing")
    arguments = parser.parse_args()
    if arguments.table:
        store(arguments.work, arguments.table)
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    done = {(row["setting"], row["seed"], row["steps"]) for row in measured(arguments.work)}
    for seed in range(arguments.seeds):
        for steps in arguments.steps:
            for name, made in {**SETTINGS, **OWN}.items():
                if (name, seed, steps) in done:
                    continue
                model = made(pretrained(seed, arguments.work)).eval()
                train(model, batch_of, steps, 1000 + seed)
                found = {str(length): accuracy(model, length) for length in LENGTHS}
                row = {"setting": name, "seed": seed, "steps": steps, "accuracy": found}
                print(json.dumps(row), flush=True)
                with open(arguments.work / "keys.jsonl", "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""TRA in a pretrained model: what a small Llama keeps of its perplexity at once and after a short training.

    python benchmarks/healing.py --data DATA --work WORK [--seeds 3] [--budgets 0 100] [--settings NAME ...]

A Llama is trained with RoPE on short windows of WikiText-2 (DATA holds train.txt and valid.txt). Each setting changes
it, trains it for each budget of steps, and is measured on validation text at several lengths, and on passages that
occur twice. Every measurement is added to WORK/results.jsonl, and what is there already is not done again. `--table`
writes the table and results.json to a folder.
"""

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from tra.environment import environment
from tra.hub import adopt
from tra.hub.adoption import TraGates

WINDOW = 128
"""Tokens of a training window; nothing longer is ever trained on."""
VOCABULARY, BATCH, PRETRAINING = 4096, 8, 1200
RATE = 1e-3
LENGTHS = (128, 1024, 4096)
MEASURED = 32_768
"""Tokens of validation text, from its beginning."""
GAPS = (64, 512)
PASSAGE, PASSAGES = 64, 32


def as_it_is(model: Any) -> Any:
    return model


def without_positions(model: Any) -> Any:
    return adopt(model, layers=[], drop_positions=True)


def yarn(model: Any) -> Any:
    """RoPE stretched from the training length to the greatest that is measured."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": max(LENGTHS) / WINDOW,
        "original_max_position_embeddings": WINDOW,
    }
    return _with_weights(transformers.LlamaForCausalLM(config), model)


def window(model: Any) -> Any:
    """The same weights as a Mistral, which sees no farther back than a training window."""
    shared = {name: getattr(model.config, name) for name in SIZES}
    config = transformers.MistralConfig(**shared, sliding_window=WINDOW, rope_parameters=model.config.rope_parameters)
    return _with_weights(transformers.MistralForCausalLM(config), model)


def fixed_decay(model: Any) -> Any:
    """ALiBi's slopes on top of RoPE: every key kept, one constant for each head, nothing learned."""
    model = adopt(model, threshold=None)
    for module in model.modules():
        if isinstance(module, TraGates):
            heads = len(module.gate_bias)
            slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
            module.gate_bias.data = -torch.log(torch.expm1(slopes))  # logsigmoid of it is minus the slope
            module.requires_grad_(False)
    return model


def _with_weights(new: Any, old: Any) -> Any:
    new.load_state_dict(old.state_dict())
    return new


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "RoPE": as_it_is,
    "YaRN": yarn,
    "sliding window of 128": window,
    "positions dropped (DroPE)": without_positions,
    "RoPE and fixed decay (ALiBi's slopes)": fixed_decay,
    "TRA, every key kept": lambda model: adopt(model, threshold=None),
    "TRA, threshold set by the query": adopt,
    "TRA, threshold 0": lambda model: adopt(model, threshold=0.0),
    "TRA, threshold set by the query, positions dropped": lambda model: adopt(model, drop_positions=True),
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")  # fmt: skip


def tokens_of(data: Path, work: Path) -> dict[str, Tensor]:
    """Training and validation text as tokens of a byte-level BPE trained on the first."""
    stored = work / "tokens.pt"
    if not stored.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train([str(data / "train.txt")], trainer)
        found = {}
        for split in ("train", "valid"):
            lines = (data / f"{split}.txt").read_text().splitlines(keepends=True)
            found[split] = torch.tensor([token for part in tokenizer.encode_batch(lines) for token in part.ids])
        torch.save(found, stored)
    return torch.load(stored, weights_only=True)


def new_llama(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=max(LENGTHS),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def train(model: Any, tokens: Tensor, steps: int, seed: int) -> None:
    """AdamW with a short warm-up and a linear decay to 0, on windows drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01, betas=(0.9, 0.95))
    warm = max(1, min(50, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    model.train()
    for step in range(steps):
        starts = torch.randint(len(tokens) - WINDOW, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + WINDOW] for start in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  step {step}: {loss.item():.3f}", flush=True)
    model.eval()


def pretrained(seed: int, tokens: Tensor, work: Path) -> Any:
    folder = work / f"llama-{seed}"
    if not (folder / "model.safetensors").exists():
        model = new_llama(seed)
        train(model, tokens, PRETRAINING, seed)
        model.save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder)


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor, length: int) -> float:
    """Of every token but the first of each window of this length."""
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    losses = []
    for part in windows.split(max(1, 4096 // length)):
        logits = model(part, use_cache=False).logits[:, :-1]
        losses.append(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return math.exp(sum(losses).item() / (windows.numel() - len(windows)))  # type: ignore[union-attr]


@torch.no_grad()
def repeated(model: Any, tokens: Tensor, gap: int) -> tuple[float, float]:
    """Perplexity of passages at their first occurrence and at a second one, with a gap of other text between."""
    losses: list[list[float]] = [[], []]
    stride = (len(tokens) - PASSAGE - gap) // PASSAGES
    for index in range(PASSAGES):
        text = tokens[index * stride :][: PASSAGE + gap]
        row = torch.cat([text, text[:PASSAGE]])[None]
        logits = model(row, use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, row[0, 1:], reduction="none")
        losses[0].append(loss[: PASSAGE - 1].mean().item())
        losses[1].append(loss[-(PASSAGE - 1) :].mean().item())
    first, second = (math.exp(statistics.fmean(part)) for part in losses)
    return first, second


def measured(work: Path) -> Iterator[dict[str, Any]]:
    path = work / "results.jsonl"
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: mean and range over seeds."""
    lengths = " | ".join(f"{length:,}" for length in LENGTHS)
    gaps = " | ".join(f"second after {gap:,}" for gap in GAPS)
    lines = [
        f"| setting | steps | {lengths} | {gaps} | seeds |",
        "|---|---:|" + "---:|" * (len(LENGTHS) + len(GAPS) + 1),
    ]
    for budget in sorted({row["steps"] for row in results}):
        for setting in SETTINGS:
            rows = [row for row in results if row["setting"] == setting and row["steps"] == budget]
            if rows:
                cells = [_spread([row["perplexity"][str(length)] for row in rows]) for length in LENGTHS]
                cells += [_spread([row["repeated"][str(gap)] for row in rows]) for gap in GAPS]
                lines.append(f"| {setting} | {budget} | {' | '.join(cells)} | {len(rows)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train.txt and valid.txt of WikiText-2")
    parser.add_argument("--work", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 100])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--table", type=Path, help="write results.json and table.md to this folder, and train nothing")
    arguments = parser.parse_args()
    if arguments.table:
        rows = list(measured(arguments.work))
        arguments.table.mkdir(parents=True, exist_ok=True)
        stored = {"environment": environment(), "results": rows}
        (arguments.table / "results.json").write_text(json.dumps(stored, indent=1) + "\n")
        (arguments.table / "table.md").write_text(table(rows))
        return
    if arguments.data is None:
        parser.error("--data is needed to train")
    arguments.work.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    tokens = tokens_of(arguments.data, arguments.work)
    done = {(row["seed"], row["setting"], row["steps"]) for row in measured(arguments.work)}
    for seed in range(arguments.seeds):
        base = pretrained(seed, tokens["train"], arguments.work)
        for budget in arguments.budgets:
            for setting in arguments.settings:
                if (seed, setting, budget) in done:
                    continue
                print(f"seed {seed}, {setting}, {budget} steps", flush=True)
                model = SETTINGS[setting](copy.deepcopy(base)).eval()
                train(model, tokens["train"], budget, 1000 + seed)
                text = tokens["valid"][:MEASURED]
                twice = {gap: repeated(model, text, gap) for gap in GAPS}
                row = {
                    "seed": seed,
                    "setting": setting,
                    "steps": budget,
                    "perplexity": {str(length): perplexity(model, text, length) for length in LENGTHS},
                    "first": {str(gap): first for gap, (first, _) in twice.items()},
                    "repeated": {str(gap): second for gap, (_, second) in twice.items()},
                }
                print(" ", json.dumps(row["perplexity"]), json.dumps(row["repeated"]), flush=True)
                with open(arguments.work / "results.jsonl", "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

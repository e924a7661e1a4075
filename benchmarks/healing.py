"""TRA in a pretrained model: what a small Llama keeps at once and after a short training.

    python benchmarks/healing.py --data DATA --work WORK [--seeds 3] [--steps 0 200] [--settings NAME ...]
    python benchmarks/healing.py --data DATA --work WORK --choices
    python benchmarks/healing.py --work WORK --table FOLDER

A Llama is trained with RoPE on short windows of WikiText-2 (DATA holds train.txt, valid.txt and test.txt). Each setting
changes the model and trains it for some more steps on such windows. Measured are the perplexity of the whole validation
text by place in a window, and that of passages that occur a second time. `--choices` compares options of `adopt` on a
part of the test text, so that defaults are not chosen on what is reported. Every measurement is added to
WORK/results.jsonl, and what is there already is not done again. `--table` writes what was measured and the tables to a
folder. Whether a model finds a key far away is measured by `benchmarks/healing_keys.py`.
"""

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from tra.environment import environment
from tra.hub import adopt
from tra.hub.adopted_attention import TraGates
from tra.runs.memory import reuse_memory

WINDOW = 128
"""Tokens of a training window; nothing longer is ever trained on."""
VOCABULARY, IN_TEXT, BATCH, PRETRAINING = 2048, 2037, 8, 1500
"""Eleven tokens of the vocabulary are in no text."""
PRETRAINING_RATE, RATE = 3e-3, 1e-3
LENGTHS = (128, 1024, 4096)
"""Perplexity is that of tokens up to each of these places in windows of the greatest, from the one before on."""
GAPS = (64, 2048)
PASSAGE, PASSAGES = 64, 32
CHOSEN_AFTER, CHOSEN_ON = 200, 65_536
"""Steps after which choices are compared, and tokens of the test text that they are compared on."""


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


def tra(model: Any, **options: Any) -> Any:
    return adopt(model, **options)


WINDOWED = "sliding window of 128"
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "RoPE": as_it_is,
    "YaRN": yarn,
    WINDOWED: window,
    "positions dropped (DroPE)": without_positions,
    "RoPE and fixed decay (ALiBi's slopes)": fixed_decay,
    "TRA, every key kept": partial(tra, threshold=None),
    "TRA, threshold set by the query": partial(tra, threshold="query"),
    "TRA, threshold set by the query, positions dropped": partial(tra, threshold="query", drop_positions=True),
}
CHOICES: dict[str, dict[str, Any]] = {
    "gate bias 3, threshold set by the query from -4, straight-through 0.5, rate 1e-3": {},
    "gate bias 1.5": {"gate_bias": 1.5},
    "gate bias 4.5": {"gate_bias": 4.5},
    "gate bias 6": {"gate_bias": 6.0},
    "every key kept": {"threshold": None},
    "every key kept, gate bias 6": {"threshold": None, "gate_bias": 6.0},
    "threshold 0": {"threshold": 0.0},
    "threshold of each head": {"threshold": "head"},
    "threshold from -8": {"threshold_start": -8.0},
    "threshold from -2": {"threshold_start": -2.0},
    "straight-through 0.25": {"straight_through": 0.25},
    "straight-through 1": {"straight_through": 1.0},
    "rate 3e-4": {"rate": 3e-4},
    "rate 3e-3": {"rate": 3e-3},
    "10 times the rate for gates and thresholds": {"gate_rate": 10.0},
}
"""The first is what `adopt` does by itself; the others change what they name."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")  # fmt: skip


def tokens_of(data: Path, work: Path) -> dict[str, Tensor]:
    """Text as tokens of a byte-level BPE that was trained on the training text."""
    stored = work / "tokens.pt"
    if not stored.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train([str(data / "train.txt")], trainers.BpeTrainer(vocab_size=IN_TEXT, initial_alphabet=alphabet))
        found = {}
        for split in ("train", "valid", "test"):
            lines = (data / f"{split}.txt").read_text().splitlines(keepends=True)
            found[split] = torch.tensor([token for part in tokenizer.encode_batch(lines) for token in part.ids])
        torch.save(found, stored)
    return torch.load(stored, weights_only=True)


def new_llama(seed: int, vocabulary: int = VOCABULARY) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=max(LENGTHS),
            initializer_range=0.1,  # the default is for wide models
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def drawn(tokens: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of the text ``[rows, length]`` from anywhere."""
    starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def text_batch(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    batch = drawn(tokens, BATCH, WINDOW, generator)
    return batch, batch


def train(
    model: Any,
    batches: Callable[[torch.Generator], tuple[Tensor, Tensor]],
    steps: int,
    seed: int,
    rate: float = RATE,
    gate_rate: float = 1.0,
) -> None:
    """AdamW with a short warm-up and a linear decay to 0."""
    generator = torch.Generator().manual_seed(seed)
    gates = [weight for module in model.modules() if isinstance(module, TraGates) for weight in module.parameters()]
    own = {id(weight) for weight in gates}
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in model.parameters() if id(weight) not in own]},
        {"params": [weight for weight in gates if weight.requires_grad], "lr": rate * gate_rate},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    warm = max(1, min(50, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    model.train()
    for step in range(steps):
        batch, labels = batches(generator)
        loss = model(batch, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  step {step}: {loss.item():.3f}", flush=True)
    model.eval()


def pretrained(seed: int, tokens: Tensor, work: Path) -> Any:
    folder = work / f"llama-{seed}"
    if not (folder / "model.safetensors").exists():
        model = new_llama(seed)
        train(model, partial(text_batch, tokens), PRETRAINING, seed, PRETRAINING_RATE)
        model.save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder)


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor) -> dict[str, float]:
    """Of every token but the first of each window, by its place; the last window may be shorter."""
    losses = [
        F.cross_entropy(model(part[None], use_cache=False).logits[0, :-1], part[1:], reduction="none")
        for part in tokens.split(max(LENGTHS))
        if len(part) > 1
    ]
    found = {}
    for start, end in zip((1, *LENGTHS), LENGTHS, strict=False):
        found[str(end)] = torch.cat([loss[start - 1 : end - 1] for loss in losses]).double().mean().exp().item()
    return found


@torch.no_grad()
def repeated(model: Any, tokens: Tensor, gap: int) -> float:
    """Perplexity of passages at their second occurrence, with a gap of other text after the first."""
    stride = (len(tokens) - PASSAGE - gap) // PASSAGES
    text = tokens.unfold(0, PASSAGE + gap, stride)[:PASSAGES]
    rows = torch.cat([text, text[:, :PASSAGE]], dim=1)
    losses = []
    for part in rows.split(max(1, 4096 // rows.shape[1])):
        logits = model(part, use_cache=False, logits_to_keep=PASSAGE).logits[:, :-1]
        losses.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1 - PASSAGE :], reduction="none"))
    return torch.cat(losses).mean().exp().item()


def measure(model: Any, text: Tensor) -> dict[str, Any]:
    """What is reported of a model."""
    return {
        "perplexity": perplexity(model, text),
        "repeated": {str(gap): repeated(model, text, gap) for gap in GAPS},
    }


def measured(work: Path) -> list[dict[str, Any]]:
    path = work / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: means over seeds with 95% intervals, Student's t over seeds."""
    columns = [("perplexity", f"to {length:,}", str(length)) for length in LENGTHS]
    columns += [("repeated", f"again after {gap:,}", str(gap)) for gap in GAPS]
    lines = [
        f"| setting | steps | {' | '.join(title for _, title, _ in columns)} | seeds |",
        "|---|---:|" + "---:|" * (len(columns) + 1),
    ]
    for name, steps, rows in groups(results):
        cells = [interval(kind, [row[kind][key] for row in rows]) for kind, _, key in columns]
        lines.append(f"| {name} | {steps:,} | {' | '.join(cells)} | {len(rows)} |")
    return "\n".join(lines) + "\n"


def differences(results: list[dict[str, Any]], control: str) -> str:
    """Markdown: perplexity less that of a control with the same seed and steps, where several seeds were measured."""
    lines = [
        f"| setting | steps | {' | '.join(f'to {length:,}' for length in LENGTHS)} |",
        "|---|---:|" + "---:|" * len(LENGTHS),
    ]
    beside = {(row["seed"], row["steps"]): row["perplexity"] for row in results if row["setting"] == control}
    for name, steps, rows in groups([row for row in results if (row["seed"], row["steps"]) in beside]):
        if name != control and len(rows) > 1:
            cells = [
                interval("less", [row["perplexity"][key] - beside[row["seed"], steps][key] for row in rows])
                for key in map(str, LENGTHS)
            ]
            lines.append(f"| {name} | {steps:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def groups(results: list[dict[str, Any]]) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """The seeds of each setting and number of steps."""
    for steps in sorted({row["steps"] for row in results}):
        for name in dict.fromkeys(row["setting"] for row in results if row["steps"] == steps):
            yield name, steps, [row for row in results if (row["setting"], row["steps"]) == (name, steps)]


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5% quantile of t for a number of seeds."""


def interval(kind: str, values: list[float]) -> str:
    unit, digits = (100, 0) if kind == "accuracy" else (1, 1)
    mean = f"{unit * statistics.fmean(values):{'+' if kind == 'less' else ''}.{digits}f}"
    if len(values) not in STUDENT:
        return mean
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {unit * half:.{digits}f}"


def planned(arguments: argparse.Namespace) -> Iterable[tuple[str, int, int, Callable[[Any], Any], dict[str, float]]]:
    """Setting, seed and steps of each measurement, what makes the model, and rates of its training."""
    if arguments.choices:
        for name, options in CHOICES.items():
            rates = {key: value for key, value in options.items() if key in ("rate", "gate_rate")}
            made = partial(tra, **{key: value for key, value in options.items() if key not in rates})
            yield name, 0, CHOSEN_AFTER, made, rates
        return
    for seed in range(arguments.seeds):
        for steps in arguments.steps:
            for name in arguments.settings:
                yield name, seed, steps, SETTINGS[name], {}


def write_tables(work: Path, folder: Path) -> None:
    rows = measured(work)
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / "results.json"  # says where the first of them were measured; later ones name their processor
    where = json.loads(stored.read_text())["environment"] if stored.exists() else environment()
    stored.write_text(json.dumps({"environment": where, "results": rows}, indent=1, sort_keys=True) + "\n")
    reported = [row for row in rows if row["setting"] in SETTINGS]
    choices = [row for row in rows if row["setting"] in CHOICES]
    tables = table(reported), differences(reported, WINDOWED), table(choices)
    (folder / "table.md").write_text("\n".join(tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train.txt, valid.txt and test.txt of WikiText-2")
    parser.add_argument("--work", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 200], help="of training after the change")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--choices", action="store_true", help="compare options of `adopt` instead")
    parser.add_argument("--table", type=Path, help="write results.json and table.md to this folder, and train nothing")
    arguments = parser.parse_args()
    if arguments.table:
        write_tables(arguments.work, arguments.table)
        return
    if arguments.data is None:
        parser.error("--data is needed to train")
    arguments.work.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    tokens = tokens_of(arguments.data, arguments.work)
    text = tokens["test"][:CHOSEN_ON] if arguments.choices else tokens["valid"]
    done = {(row["setting"], row["seed"], row["steps"]) for row in measured(arguments.work)}
    reuse_memory()
    full: dict[tuple[int, int], Any] = {}
    for name, seed, steps, made, rates in planned(arguments):
        if (name, seed, steps) in done:
            continue
        print(f"seed {seed}, {name}, {steps} steps", flush=True)
        if name == WINDOWED and (seed, steps) in full:  # in training windows of that size the two are one model
            model = made(full[seed, steps]).eval()
        else:
            model = made(pretrained(seed, tokens["train"], arguments.work)).eval()
            train(model, partial(text_batch, tokens["train"]), steps, 1000 + seed, **rates)
        if name == "RoPE":
            full = {(seed, steps): model}
        row = {"setting": name, "seed": seed, "steps": steps, "processor": environment()["processor"]}
        row |= measure(model, text)
        print(" ", json.dumps(row), flush=True)
        with open(arguments.work / "results.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

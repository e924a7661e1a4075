"""TRA in a pretrained model, as an experiment: what a small Llama keeps at once and after a short training.

    tra reproduce benchmarks/healing.py --output WORK [--scale small] [--seeds 3] [--columns 0 50 200 1000]
    tra reproduce benchmarks/healing.py --output WORK --scale choices

A Llama is trained with RoPE on short windows of WikiText-2. Each row changes the model, each column trains it for so
many more steps on such windows. Measured are the perplexity of the whole validation text by place in a window, and that
of passages that occur a second time. The scale "choices" compares options of `adopt` on a part of the test text, so
that defaults are not chosen on what is reported. Every measurement is added to WORK/results.json, and what is there
already is not done again. Whether a model finds a key far away is measured by `benchmarks/healing_keys.py`.
"""

import copy
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from tra.environment import environment
from tra.errors import RunError
from tra.experiments import Experiment, Outcome, Request, Row
from tra.experiments.grid import Grid
from tra.files import locked, read_json, write_text, written_aside
from tra.hub import adopt
from tra.hub.adopted_attention import TraGates
from tra.lookup import lookup
from tra.model import DecoderConfig
from tra.progress import progress, say
from tra.recipes import Evaluation, Recipe, RecipeOf
from tra.report.tables import Table, markdown
from tra.runs.memory import reuse_memory
from tra.text.source import SPLITS, Source

WINDOW = 128
"""Tokens of a training window; nothing longer is ever trained on."""
VOCABULARY, IN_TEXT = 2048, 2037
"""Eleven tokens of the vocabulary are in no text."""
RATE = 1e-3
"""Of the training after the change."""
GAPS = (64, 2048)
PASSAGE, PASSAGES = 64, 32


def base_model(attention: str = "rope") -> Recipe:
    """The model that is changed: a Llama of these sizes. Perplexity is that of tokens up to each length in windows of
    the greatest, from the one before on."""
    return Recipe(
        name="healing",
        model=DecoderConfig(vocabulary=VOCABULARY, layers=2, heads=4, width=64, attention="rope"),
        task="text",
        task_options={"train": "wikitext-2", "tokenizer": f"bpe-{IN_TEXT}"},
        length=WINDOW,
        steps=1500,
        batch=8,
        learning_rate=3e-3,
        evaluations=tuple(Evaluation("valid", length, None) for length in (WINDOW, 1024, 4096)),
    )


def shrunk(recipe_of: RecipeOf) -> RecipeOf:
    """To see in seconds that everything works; nothing is learned."""

    def smoke(attention: str = "rope") -> Recipe:
        recipe = recipe_of()
        model = replace(recipe.model, layers=1, heads=2, width=16)
        evaluations = tuple(replace(recipe.evaluations[0], length=length, examples=16) for length in (WINDOW, 256))
        return replace(recipe, name="healing-smoke", model=model, steps=2, batch=2, evaluations=evaluations)

    return smoke


def on_test_text(attention: str = "rope") -> Recipe:
    """The same model, measured on 65,536 tokens of the test text."""
    evaluations = tuple(Evaluation("test", entry.length, 65_536 // entry.length) for entry in base_model().evaluations)
    return replace(base_model(), evaluations=evaluations)


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
        "factor": model.config.max_position_embeddings / WINDOW,
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


WINDOWED = "sliding window of 128"
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "RoPE": as_it_is,
    "YaRN": yarn,
    WINDOWED: window,
    "positions dropped (DroPE)": without_positions,
    "RoPE and fixed decay (ALiBi's slopes)": fixed_decay,
    "TRA, every key kept": partial(adopt, threshold=None),
    "TRA, threshold set by the query": partial(adopt, threshold="query"),
    "TRA, threshold set by the query, positions dropped": partial(adopt, threshold="query", drop_positions=True),
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
RATES = ("rate", "gate_rate")
"""Which of these options are those of training."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")  # fmt: skip


@lru_cache(maxsize=1)
def tokens_of(text: str) -> dict[str, Tensor]:
    """A text as tokens of a byte-level BPE that was trained on the training text, line by line."""
    source = Source(text)
    lines = {split: "".join(source.pieces(split)).splitlines(keepends=True) for split in SPLITS}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=IN_TEXT, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines["train"], trainer)
    return {
        split: torch.tensor([token for part in tokenizer.encode_batch(some) for token in part.ids])
        for split, some in lines.items()
    }


def new_llama(recipe: Recipe) -> Any:
    torch.manual_seed(recipe.seed)
    sizes = recipe.model
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=sizes.width * 11 // 4,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads,
            max_position_embeddings=max(entry.length for entry in recipe.evaluations),
            initializer_range=0.1,  # the default is for wide models
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


Batches = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""Draws tokens and labels of a step."""


def drawn(tokens: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of the text ``[rows, length]`` from anywhere."""
    starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def text_batches(recipe: Recipe) -> Batches:
    tokens = tokens_of(recipe.task_options["train"])["train"]

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        batch = drawn(tokens, recipe.batch, WINDOW, generator)
        return batch, batch

    return draw


def train(
    model: Any,
    batches: Batches,
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
    with progress("training", max(1, steps), "step") as update:
        for step in range(steps):
            batch, labels = batches(generator)
            loss = model(batch, labels=labels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            update(step + 1, loss=loss.item())
    model.eval()


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor, lengths: Sequence[int]) -> dict[str, float]:
    """Of every token but the first of each window, by its place; the last window may be shorter."""
    losses = [
        F.cross_entropy(model(part[None], use_cache=False).logits[0, :-1], part[1:], reduction="none")
        for part in tokens.split(max(lengths))
        if len(part) > 1
    ]
    found = {}
    for start, end in zip((1, *lengths), lengths, strict=False):
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


def measure_text(model: Any, recipe: Recipe) -> dict[str, Any]:
    """What is reported of a model."""
    lengths, entry = [entry.length for entry in recipe.evaluations], recipe.evaluations[-1]
    text = tokens_of(recipe.task_options["train"])[entry.name]
    text = text if entry.examples is None else text[: entry.examples * entry.length]
    return {
        "perplexity": perplexity(model, text, lengths),
        "repeated": {str(gap): repeated(model, text, gap) for gap in GAPS},
    }


Results = Sequence[Mapping[str, Any]]


def table(results: Results) -> Table:
    """Means over seeds with 95% intervals, Student's t over seeds."""
    lengths = sorted(results[0]["perplexity"], key=int)
    columns = [("perplexity", f"to {int(key):,}", key) for key in lengths]
    columns += [("repeated", f"again after {gap:,}", str(gap)) for gap in GAPS]
    rows = []
    for name, steps, some in groups(results):
        cells = [interval(kind, [row[kind][key] for row in some]) for kind, _, key in columns]
        rows.append([name, f"{steps:,}", *cells, str(len(some))])
    return Table(["setting", "steps", *(title for _, title, _ in columns), "seeds"], rows)


def differences(results: Results, control: str) -> Table:
    """Perplexity less that of a control with the same seed and steps, where several seeds were measured."""
    lengths = sorted(results[0]["perplexity"], key=int)
    beside = {(row["seed"], row["steps"]): row["perplexity"] for row in results if row["setting"] == control}
    rows = []
    for name, steps, some in groups([row for row in results if (row["seed"], row["steps"]) in beside]):
        if name != control and len(some) > 1:
            cells = [
                interval("less", [row["perplexity"][key] - beside[row["seed"], steps][key] for row in some])
                for key in lengths
            ]
            rows.append([name, f"{steps:,}", *cells])
    return Table(["setting", "steps", *(f"to {int(key):,}" for key in lengths)], rows)


def text_tables(outcome: Outcome) -> list[Table]:
    reported, choices = (
        [row for row in outcome.content["results"] if row["setting"] in some] for some in (SETTINGS, CHOICES)
    )
    found = [table(reported), differences(reported, WINDOWED)] if reported else []
    return [*found, *([table(choices)] if choices else [])]


def groups(results: Results) -> Iterator[tuple[str, int, Results]]:
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


@dataclass(frozen=True)
class Healing(Experiment):
    """An experiment whose runs are models of transformers, which it therefore trains by itself, one after another.

    Its recipes are those of the base model, of which there is one for each seed. Each row changes it, and each column
    trains it for as many more steps as it is called.
    """

    changes: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """What each row does to the base model."""
    batches: Callable[[Recipe], Batches] = text_batches
    measure: Callable[[Any, Recipe], dict[str, Any]] = measure_text

    def perform(self, request: Request) -> Outcome:
        """Train and measure what is missing, and write tables of all that was ever measured in the folder."""
        for name in ("jobs", "shard", "figures", "style", "join", "cluster"):
            if getattr(request, name) != getattr(Request(), name):
                raise ValueError(f"{name} must be left out: this experiment has no use for it")
        grid = Grid.of(replace(self, **self.at_scale.get(request.scale or "", {})), request)
        for row in grid.rows:
            lookup({every.label: every for every in grid.every_row}, row.label, "attention")
        path = grid.folder / self.file("results.json")
        grid.folder.mkdir(parents=True, exist_ok=True)
        with locked(path):
            content = read_json(path) if path.exists() else {"environment": environment(), "results": []}
            if request.train:
                for found in self.missing(grid, content["results"]):
                    content["results"].append(found)
                    write_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
        if not content["results"]:
            raise RunError(f"no run in {grid.folder} is finished")
        outcome = Outcome([], [], folder=grid.folder, content=content)
        shown = markdown(self.tables(outcome))
        write_text(grid.folder / self.file("table.md"), shown)
        return replace(outcome, shown=shown)

    def missing(self, grid: Grid, rows: Results) -> Iterator[dict[str, Any]]:
        """What is measured, one after another, of all that was not."""
        transformers.utils.logging.disable_progress_bar()
        reuse_memory()
        done = {(row["setting"], row["seed"], row["steps"]) for row in rows}
        cells = [cell for cell in grid.cells() if (cell.row, cell.recipe.seed, int(cell.column)) not in done]
        full: dict[tuple[int, int], Any] = {}
        for number, cell in enumerate(cells, 1):
            seed, steps = cell.recipe.seed, int(cell.column)
            say(f"{number} of {len(cells)}: {cell.row}, {steps} steps, seed {seed}")
            if cell.row == WINDOWED and (seed, steps) in full:  # in training windows of that size the two are one model
                model = self.changes[cell.row](full[seed, steps]).eval()
            else:
                model = self.changes[cell.row](self.pretrained(cell.recipe, grid.folder)).eval()
                options = CHOICES.get(cell.row, {})
                rates = {name: options[name] for name in RATES if name in options}
                train(model, self.batches(cell.recipe), steps, 1000 + seed, **rates)
            if cell.row == "RoPE":
                full = {(seed, steps): model}
            found = self.measure(model, cell.recipe)
            yield {"setting": cell.row, "seed": seed, "steps": steps, "processor": environment()["processor"], **found}

    def pretrained(self, recipe: Recipe, work: Path) -> Any:
        """The base model of a seed, trained once."""
        folder = work / f"base-{recipe.task}" / str(recipe.seed)
        if not folder.exists():
            model = new_llama(recipe)
            train(model, self.batches(recipe), recipe.steps, recipe.seed, recipe.learning_rate)
            folder.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(folder) as aside:
                model.save_pretrained(aside)
                (aside / "base.json").write_text(recipe.to_json())
        stored = Recipe.from_json((folder / "base.json").read_text())
        if unlike := recipe.differences(stored).keys() - {"evaluations"}:
            raise ValueError(f"output must be another folder: {folder} differs in {', '.join(sorted(unlike))}")
        return transformers.LlamaForCausalLM.from_pretrained(folder)

    def plan(self, request: Request) -> Table:
        raise ValueError("dry_run must be left out: this experiment makes no estimates")


def adopting(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    return partial(adopt, **{name: value for name, value in options.items() if name not in RATES})


def rows_of(labels: Iterable[str]) -> tuple[Row, ...]:
    """Settings as rows, which `--attention tra` and `--attention rope` choose from."""
    return tuple(Row("tra" if name in CHOICES or "TRA" in name else "rope", name=name) for name in labels)


experiment = Healing(
    scales={
        "smoke": dict.fromkeys(("0", "2"), shrunk(base_model)),
        "small": dict.fromkeys(("0", "50", "200", "1000"), base_model),
        "choices": {"200": on_test_text},
    },
    rows=rows_of(SETTINGS),
    seeds=3,
    at_scale={"smoke": {"seeds": 1}, "choices": {"seeds": 1, "rows": rows_of(CHOICES)}},
    tables=text_tables,
    changes={**SETTINGS, **{name: adopting(options) for name, options in CHOICES.items()}},
)

"""The command line: every command's options, and what it calls."""

import json
import math
import os
import shlex
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import tra
from tra.errors import Interrupted, RunError
from tra.lookup import lookup
from tra.recipes import RECIPES, Evaluation, Recipe

DESCRIPTIONS = {
    "demo": "Train TRA and RoPE on flip-flop and compare them past the training length (about a minute or two).",
    "train": "Train a recipe: tra train RECIPE [options], or go on with tra train --resume RUN.",
    "evaluate": "Measure a trained run on its recipe's sets, or on others.",
    "reproduce": "Make a table or figure of the paper: tra reproduce NAME --scale smoke|small|paper.",
    "inspect": "Show what a trained run attends to: heatmaps, and a summary of every head.",
    "export": "Write a run as a Hugging Face folder: tra export RUN FOLDER.",
    "generate": "Continue a prompt with a run on text or an exported folder, streaming.",
    "bench": "Measure the operator and whole training steps against PyTorch's attention, as ratios.",
    "list": "List recipes, attention mechanisms, tasks and model sizes.",
}


@dataclass(frozen=True)
class Demo:
    """Train TRA and RoPE on 64-token flip-flop, evaluate both at up to 4,096 tokens, write table and figures."""

    output: Path | None = None
    """Folder to write; a new one under runs/ by default."""
    seed: int = 0
    attention: tuple[str, ...] = ("tra", "rope")
    """Mechanisms to compare."""


@dataclass(frozen=True)
class Train:
    """Train a recipe. Options override what the recipe says."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    output: Path | None = None
    """Run folder; runs/RECIPE-ATTENTION-SEED by default."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder."""


@dataclass(frozen=True)
class Resume:
    """Go on with an interrupted run."""

    resume: Path
    """The run folder."""
    tensorboard: bool = False


@dataclass(frozen=True)
class Evaluate:
    """Measure a trained run: full-sequence exact match on named, fixed sets, or the perplexity of text."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    sets: tuple[str, ...] = ()
    """Names of evaluation sets; those of the recipe by default."""
    lengths: tuple[int, ...] = ()
    """Lengths in the task's unit, windows in tokens for text; those of the recipe by default."""
    examples: int | None = None
    """Sequences per set; as many as the recipe says by default, else 100. Of a text: windows; by default every length
    reads as much as the recipe does."""
    stride: int | None = None
    """Of a text: let windows overlap and move on by this many tokens; without it they lie side by side."""
    data: str | None = None
    """Instead of generated sets, the published copy: "hub", or a folder that holds it."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Reproduce:
    """Run the grid behind a table or figure, and make it from the stored results.

    Finished runs are skipped and interrupted ones go on where they were, so the same command can be given again.
    """

    name: Annotated[str, tyro.conf.Positional]
    """table1, figure1, figure2, figure3, cost, or tuning (the learning rates of table1)."""
    scale: str = "small"
    """smoke (seconds), small (two cores, hours) or paper (GPUs)."""
    seeds: int | None = None
    """Runs of each kind, with seeds 0, 1, ...; 3 for table1, 2 for figure2, else 1, by default."""
    attention: str = ""
    """Mechanisms, separated by commas; all of the table or figure by default."""
    output: Path | None = None
    """Folder to work in; runs/NAME-SCALE by default."""
    jobs: int = 1
    """Runs at the same time, each with its part of the threads (or a GPU of its own)."""
    shard: str = "1/1"
    """This machine's part of the runs, e.g. 2/3, where several machines share the folder."""
    train: bool = True
    """--no-train makes table and figures from what is stored, without training."""
    json: bool = False
    """Print the results as JSON."""


@dataclass(frozen=True)
class Inspect:
    """Draw a run's attention on one sequence, white where it is exactly null, and summarise every head."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    text: str | None = None
    """What to read, for a run on text, or @FILE; other runs read a sequence of their task."""
    length: int = 32
    """Of a task's sequence, in its unit."""
    output: Path | None = None
    """Folder to write; RUN/inspection by default."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Export:
    """Write a run as a folder that transformers loads: safetensors, config, tokenizer, model card."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    folder: Annotated[Path, tyro.conf.Positional]
    """Folder to write, which must not exist yet."""


@dataclass(frozen=True)
class Generate:
    """Continue a prompt, printing text as it comes and then the speed."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder of a run on text, or a folder that tra export wrote."""
    prompt: str
    """The text to continue, or @FILE to read it from a file (a text that begins with @ has @@); it may be longer than
    the training window."""
    tokens: int = 100
    """New tokens at most."""
    temperature: float = 1.0
    """Of sampling; 0 takes the most probable token every time."""
    top_k: int = 0
    """Sample among so many of the most probable tokens; 0 means all."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together have this probability."""
    beams: int = 1
    """Beams of beam search, which neither samples nor streams."""
    seed: int = 0
    json: bool = False
    """Print JSON at the end instead of streaming."""


@dataclass(frozen=True)
class Bench:
    """Time TRA against PyTorch's attention, interleaved in one run, and write the ratios as JSON and a plot."""

    output: Path | None = None
    """Folder to write; a new one under runs/ by default."""
    seconds: float = 5.0
    """Time for each comparison."""
    only: str = ""
    """Measure only rows whose name contains this."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class List:
    """List recipes, attention mechanisms, tasks and model sizes."""

    json: bool = False
    """Print JSON."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a wrong argument, 1 for a failure, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.showwarning = lambda message, *_, **__: print(f"tra: warning: {message}", file=sys.stderr)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: tra COMMAND [options]   (tra COMMAND --help says more)\n")
        print("\n".join(f"  {name:<10} {text}" for name, text in DESCRIPTIONS.items()))
        return 0
    if arguments[0] == "--version":
        print(f"tra {tra.__version__}")
        return 0
    # Each imports what it needs itself: a misspelt command should not wait for the training stack.
    commands = {
        "demo": _demo,
        "train": _train,
        "evaluate": _evaluate,
        "reproduce": _reproduce,
        "inspect": _inspect,
        "export": _export,
        "generate": _generate,
        "bench": _bench,
        "list": _list,
    }
    try:
        command = lookup(commands, arguments[0], "command")
        return command(arguments[1:])
    except ValueError as error:
        print(f"tra: error: {error}", file=sys.stderr)
        return 2
    except (OSError, RunError) as error:
        print(f"tra: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"tra: error: {error}: pip install 'threshold-relative-attention[hub]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"tra: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130


def _demo(arguments: list[str]) -> int:
    options = tyro.cli(Demo, args=arguments, prog="tra demo")
    from tra.attention import MECHANISMS
    from tra.demo import demonstrate

    if not options.attention:
        raise ValueError("attention must name at least one mechanism")
    for name in options.attention:
        lookup(MECHANISMS, name, "attention")
    folder = options.output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    console = _console()
    try:
        content = demonstrate(folder, options.seed, options.attention, console)
    except Interrupted as stop:
        again = f"tra demo --seed {options.seed} --attention {' '.join(options.attention)} --output {folder}"
        raise Interrupted(f"{stop}; go on with: {again}") from None
    console.print((folder / "table.md").read_text(), markup=False, highlight=False)
    console.print(f"{content['seconds']:.0f} s. Results, table and figures are in")
    print(folder)
    return 0


def _train(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        recipe = lookup(RECIPES, arguments[0], "recipe")()
        options = tyro.cli(Train, args=arguments[1:], default=Train(recipe), prog=f"tra train {arguments[0]}")
        recipe, tensorboard = options.recipe, options.tensorboard
        folder = options.output or Path("runs") / f"{recipe.name}-{recipe.model.attention}-{recipe.seed}"
        if (folder / "recipe.json").exists() and _is_first_process():
            raise ValueError(f"output {folder} already holds a run: go on with it by tra train --resume {folder}")
    elif any(argument.split("=")[0] == "--resume" for argument in arguments):
        from tra.runs import load_recipe

        resume = tyro.cli(Resume, args=arguments, prog="tra train")
        folder, tensorboard = resume.resume, resume.tensorboard
        recipe = load_recipe(folder)
    elif {"-h", "--help"} & set(arguments):
        print(f"usage: tra train RECIPE [options] | tra train --resume RUN\nrecipes: {', '.join(RECIPES)}")
        return 0
    else:
        raise ValueError(f"recipe or --resume RUN must be given; recipes: {', '.join(RECIPES)}")

    from tra.evaluation import evaluate_all
    from tra.runs import store_results
    from tra.training import train

    console = _console()
    try:
        model = train(recipe, folder, console=console, tensorboard=tensorboard)
    except Interrupted as stop:
        raise Interrupted(f"{stop}; go on with: tra train --resume {folder}") from None
    if _is_first_process():
        store_results(folder, recipe, recipe.steps, evaluate_all(model, recipe, recipe.evaluations, console))
        print(folder)
    return 0


def _evaluate(arguments: list[str]) -> int:
    options = tyro.cli(Evaluate, args=arguments, prog="tra evaluate")
    from tra.evaluation import evaluate_all, evaluate_published
    from tra.report import environment, results_table
    from tra.runs import load_model, load_recipe, store_results, with_own_tokenizer

    recipe = with_own_tokenizer(load_recipe(options.run), options.run)
    names = options.sets or tuple(dict.fromkeys(entry.name for entry in recipe.evaluations))
    lengths = options.lengths or tuple(
        dict.fromkeys(entry.length for entry in recipe.evaluations if entry.length >= (options.stride or 1))
    )
    if not names or not (lengths or options.data):
        raise ValueError(f"sets and lengths must be given: the recipe of {options.run} names none")
    console = Console(quiet=True) if options.json else _console()
    model, step = load_model(options.run)
    if step < recipe.steps:
        print(f"tra: warning: the run is at step {step} of {recipe.steps}", file=sys.stderr)
    custom = any((options.sets, options.lengths, options.examples is not None, options.data, options.stride))
    if options.data is not None:
        if recipe.text is not None:
            raise ValueError(f"data must be left out: {options.run} is a language model, got {options.data!r}")
        folder = None if options.data == "hub" else Path(options.data)
        results = evaluate_published(model, recipe.build_task(), names, folder)
    elif custom:
        evaluations = [
            Evaluation(
                name,
                length,
                _examples(recipe, name, length) if options.examples is None else options.examples,
                options.stride,
            )
            for length in lengths
            for name in names
        ]
        results = evaluate_all(model, recipe, evaluations, console)
    else:
        results = evaluate_all(model, recipe, recipe.evaluations, console)
    if custom:
        content = {"step": step, "environment": environment(), "results": results}
    else:
        content = store_results(options.run, recipe, step, results)
    if options.json:
        print(json.dumps(content, indent=2))
    else:
        print(results_table(recipe.model.attention, results), end="")
    return 0


def _examples(recipe: Recipe, name: str, length: int) -> int | None:
    """How many sequences to measure when nobody says. Of a text, all lengths read the same tokens."""
    if recipe.text is not None:
        tokens = [entry.length * entry.examples for entry in recipe.evaluations if entry.examples is not None]
        return max(1, max(tokens) // max(1, length)) if tokens else None
    return next((entry.examples for entry in recipe.evaluations if (entry.name, entry.length) == (name, length)), 100)


def _reproduce(arguments: list[str]) -> int:
    options = tyro.cli(Reproduce, args=arguments, prog="tra reproduce")
    from tra.cost import draw_cost, measure_cost
    from tra.reproduce import REPRODUCTIONS, reproduce

    lookup({**REPRODUCTIONS, "cost": None}, options.name, "name")
    for name, number in (("seeds", options.seeds), ("jobs", options.jobs)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    index, _, count = options.shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"shard must be i/n with 1 <= i <= n, got {options.shard!r}")
    folder = options.output or Path("runs") / f"{options.name}-{options.scale}"
    command = shlex.join(["tra", "reproduce", *arguments])
    console = Console(quiet=True) if options.json else _console()
    attention = list(dict.fromkeys(name.strip() for name in options.attention.split(",") if name.strip()))
    try:
        if options.name == "cost":
            cells = []
            if options.train:
                measure_cost(folder, scale=options.scale, attention=attention, console=console, command=command)
            else:
                draw_cost(folder)
        else:
            cells = reproduce(
                options.name,
                folder,
                scale=options.scale,
                seeds=options.seeds,
                attention=attention,
                jobs=options.jobs,
                shard=(int(index), int(count)),
                train=options.train,
                console=console,
                command=command,
            )
    except Interrupted as stop:
        raise Interrupted(f"{stop} by: {command}") from None
    failed = [cell for cell in cells if cell.failure() is not None]
    for cell in failed:
        print(f"tra: {cell.label} failed: {cell.failure()}", file=sys.stderr)
    made = REPRODUCTIONS.get(options.name)
    results, table = (made.results, made.table) if made else ("results.json", "table.md")
    if options.json:
        print((folder / results).read_text(), end="")
    else:
        if (folder / table).exists():
            console.print((folder / table).read_text(), markup=False, highlight=False)
        print(folder)
    return 1 if failed else 0


def _inspect(arguments: list[str]) -> int:
    options = tyro.cli(Inspect, args=arguments, prog="tra inspect")
    from tra.inspection import write_inspection
    from tra.runs import load_model, load_recipe, load_task

    recipe, task = load_recipe(options.run), load_task(options.run)
    if recipe.text is None:
        if options.text is not None:
            raise ValueError(f"text must be left out: {options.run} was trained on {recipe.task}")
        tokens, symbols = task.example(options.length)
    else:
        if not options.text:
            raise ValueError(f"text must be given: {options.run} is a language model")
        tokens, symbols = task.read(_or_file(options.text, "text"))
    model, _ = load_model(options.run)
    folder = options.output or options.run / "inspection"
    content = write_inspection(model, tokens, symbols, folder)
    if options.json:
        print(json.dumps(content, indent=2))
    else:
        _console().print((folder / "heads.md").read_text(), markup=False, highlight=False)
        print(folder)
    return 0


def _export(arguments: list[str]) -> int:
    options = tyro.cli(Export, args=arguments, prog="tra export")
    from tra.export import export

    export(options.run, options.folder)
    print(options.folder)
    return 0


def _generate(arguments: list[str]) -> int:
    options = tyro.cli(Generate, args=arguments, prog="tra generate")
    for name, wrong, expected in (
        ("tokens", options.tokens < 1, "at least 1"),
        ("temperature", not 0 <= options.temperature < math.inf, "at least 0"),
        ("top_k", options.top_k < 0, "at least 0"),
        ("top_p", not 0 < options.top_p <= 1, "in (0, 1]"),
        ("beams", options.beams < 1, "at least 1"),
    ):
        if wrong:
            raise ValueError(f"{name} must be {expected}, got {getattr(options, name)!r}")
    if options.beams > 1 and (options.temperature, options.top_k, options.top_p) != (1.0, 0, 1.0):
        raise ValueError(f"beams must be 1 for temperature, top_k and top_p to matter, got {options.beams}")
    prompt = _or_file(options.prompt, "prompt")
    from tra.generation import generate, load

    model, tokenizer = load(options.run)
    how: dict[str, Any] = {"max_new_tokens": options.tokens, "num_beams": options.beams}
    if options.beams == 1 and options.temperature > 0:
        how |= {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    streams = options.beams == 1 and not options.json
    if streams:
        print(prompt, end="", flush=True)
    result = generate(model, tokenizer, prompt, options.seed, streams, **how)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    if not streams:
        print(prompt + result["text"])
    read = f"{result['prompt_tokens']} tokens read"
    if result["prompt_seconds"] is not None:
        read += f" in {result['prompt_seconds']:.2f} s"
    speed = "" if result["tokens_per_second"] is None else f" at {result['tokens_per_second']:.1f} tokens/s"
    print(f"{read}, {result['new_tokens']} new{speed}", file=sys.stderr)
    return 0


def _or_file(text: str, argument: str) -> str:
    """A text, or with @ before it the file that holds it; @@ stands for an @ that is text."""
    if not text.startswith("@") or text.startswith("@@"):
        return text.removeprefix("@")
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{argument} must be text, @@ before what begins with @, or @ and a file: {error}") from error


def _bench(arguments: list[str]) -> int:
    options = tyro.cli(Bench, args=arguments, prog="tra bench")
    if options.seconds <= 0:
        raise ValueError(f"seconds must be positive, got {options.seconds!r}")
    from tra.bench import run

    folder = options.output or Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S")
    content = run(folder, options.seconds, options.only, Console(quiet=True) if options.json else _console())
    print(json.dumps(content, indent=2) if options.json else folder)
    return 0


def _list(arguments: list[str]) -> int:
    options = tyro.cli(List, args=arguments, prog="tra list")
    from tra.attention import MECHANISMS
    from tra.model import SIZES
    from tra.ops.threshold_relative import cpu
    from tra.tasks import TASKS

    def first_line(thing: object) -> str:
        return (thing.__doc__ or "").strip().splitlines()[0]

    kernel = f"native kernel, {cpu.variant}" if cpu.variant else "not built: a C++ compiler is needed"
    content = {
        "implementations": {"cpu": kernel, "reference": "plain PyTorch, any device and floating dtype"},
        "recipes": {name: _outline(recipe()) for name, recipe in RECIPES.items()},
        "attention": {name: first_line(mechanism) for name, mechanism in MECHANISMS.items()},
        "tasks": {name: first_line(sys.modules[type(task).__module__]) for name, task in TASKS.items()}
        | {"text": "Language modelling: predict the next token of real text."},
        "sizes": {
            name: f"{size.layers} layers, {size.heads} heads, width {size.width}" for name, size in SIZES.items()
        },
    }
    if options.json:
        print(json.dumps(content, indent=2))
        return 0
    for kind, entries in content.items():
        table = Table("name", "what", title=kind, title_justify="left", title_style="bold")
        for name, text in entries.items():
            table.add_row(name, text)
        Console().print(table)
    return 0


def _outline(recipe: Recipe) -> str:
    model = recipe.model
    unit = "tokens" if recipe.text else recipe.build_task().unit  # a text's task needs more than a list should
    return (
        f"{recipe.task}, up to {recipe.length} {unit}; {model.layers} layers, width {model.width}; "
        f"{recipe.steps:,} steps of {recipe.batch}"
    )


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _console() -> Console:
    return Console(soft_wrap=True)

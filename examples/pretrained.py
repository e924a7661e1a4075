"""Make the small trained models that come with the package: `python examples/pretrained.py flip-flop text`.

Each is trained, rounded to bfloat16, measured as it is then, and written as a run folder to tra/runs/pretrained. On two
cores this takes a few minutes. The text is WikiText-2, from $TRA_DATA or the hub.
"""

import argparse
import shutil
from pathlib import Path

import torch

from tra.hub.export import model_card
from tra.model import DecoderConfig
from tra.progress import shown
from tra.recipes import Evaluation, Recipe, build_recipe
from tra.runs import Run, evaluate, load_run, train
from tra.runs.folder import PRETRAINED_FOLDER

LARGEST = 2_000_000
"""Bytes of weights."""


def flip_flop() -> Recipe:
    return build_recipe("flip-flop-small").changed({"model.attention_options.straight_through": 0.5})


def text() -> Recipe:
    return Recipe(
        name="wikitext2-tiny",
        model=DecoderConfig(
            vocabulary=2048,
            layers=3,
            heads=4,
            width=128,
            dropout=0.0,
            attention_options={"straight_through": 0.5},
            tied_embeddings=True,
        ),
        task="text",
        task_options={"train": "wikitext-2", "tokenizer": "bpe-2048"},
        length=128,
        steps=700,
        batch=16,
        learning_rate=4e-3,
        beta2=0.95,
        checkpoint_every=50,
        evaluations=tuple(Evaluation("test", window, (1 << 15) // window) for window in (128, 512, 2048)),
    )


MODELS = {"flip-flop": flip_flop, "text": text}


def round_weights(trained: Run, folder: Path) -> Run:
    """A copy of a run with weights in bfloat16, and nothing to go on training with."""
    folder.mkdir(parents=True)
    for name in ("recipe.json", "metrics.jsonl", "tokenizer.json"):
        if (trained.folder / name).exists():
            shutil.copy(trained.folder / name, folder)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in trained.model.state_dict().items()}
    if trained.recipe.model.tied_embeddings:
        del weights["head.weight"]
    rounded = Run(folder)
    rounded.checkpoints.save(trained.step, {"model": weights, "optimizer": {}}, keep=1)
    size = sum(tensor.numel() * 2 for tensor in weights.values())
    assert size < LARGEST, f"{size:,} bytes of weights"
    return rounded


def make(name: str, work: Path) -> None:
    with shown():
        trained = train(MODELS[name](), work / name, measure=False)
    folder = PRETRAINED_FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    rounded = round_weights(load_run(trained.folder), folder)
    with shown():
        rounded.store_results(rounded.step, rounded.task, evaluate(rounded))
    (folder / "README.md").write_text(card_of(rounded))


def card_of(run: Run) -> str:
    """What an exported model's card says, with the commands that use this one."""
    name = run.folder.name
    card = model_card(run, name, auto_map=False)
    reads = name == "text"
    try_it = 'tra generate pretrained:text --prompt "The river"' if reads else f"tra evaluate pretrained:{name}"
    text = ' --text "The river rises in the hills ."' if reads else ""
    use = (
        f"Made by `python examples/pretrained.py {name}`. Weights are rounded to bfloat16, and were measured so.\n\n"
        f"## Use\n\n```bash\n{try_it}\ntra inspect pretrained:{name}{text} --html\n```\n\n"
    )
    about = card[card.index("# ") : card.index("## Use")]
    return about + use + card[card.index("## Results") :]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], help="which; all by default")
    parser.add_argument("--work", type=Path, default=Path("runs/pretrained"), help="folder to train in")
    options = parser.parse_args()
    for chosen in options.names or MODELS:
        make(chosen, options.work.absolute())

"""A tiny run on text, trained in a second or two, for tests of what is done with one."""

from pathlib import Path

from tra.model import DecoderConfig
from tra.recipes import Evaluation, Recipe
from tra.runs import train

SENTENCES = "The river rises in the hills . In 1847 the river flooded the town .\n"


def write_text(folder: Path) -> Path:
    """A folder with the three splits of a text."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, copies in (("train", 200), ("valid", 20), ("test", 20)):
        (folder / f"{split}.txt").write_text(SENTENCES * copies)
    return folder


def text_recipe(folder: Path, attention: str = "tra") -> Recipe:
    return Recipe(
        name="tiny",
        model=DecoderConfig(vocabulary=300, layers=2, heads=2, width=16, attention=attention, dropout=0.0),
        task="text",
        task_options={"train": str(folder), "tokenizer": "bpe-300"},
        length=16,
        steps=30,
        batch=8,
        learning_rate=1e-2,
        evaluations=(Evaluation("valid", 16, 8), Evaluation("valid", 32, 4, stride=8)),
    )


def train_on_text(root: Path) -> Path:
    """The folder of a finished run."""
    return train(text_recipe(write_text(root / "text")), root / "run").folder

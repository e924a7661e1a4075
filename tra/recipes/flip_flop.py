"""Flip-flop language modelling: at the paper's scale, and at one for two cores."""

from tra.model import DecoderConfig, sized
from tra.recipes.base import Recipe
from tra.tasks import Evaluation

SETS = ("iid", "sparse", "dense")


def flip_flop(attention: str = "tra") -> Recipe:
    """The paper's run: mini model, 20,000 steps on 1.6M sequences of 512 tokens, which it calls one pass."""
    return Recipe(
        name="flip-flop",
        model=sized("mini", attention=attention),
        task="flip_flop",
        length=512,
        steps=20_000,
        batch=64,
        learning_rate=1e-4,
        data="fixed",
        examples=1_600_000,
        log_every=100,
        checkpoint_every=1000,
        evaluations=(
            Evaluation("iid", 512, 16_000),
            Evaluation("sparse", 512, 160_000),
            Evaluation("dense", 512, 4_000),
        ),
    )


def flip_flop_small(attention: str = "tra") -> Recipe:
    """Trains at 64 tokens on two cores in about a minute, and is measured at up to 64 times that length."""
    return Recipe(
        name="flip-flop-small",
        model=DecoderConfig(vocabulary=6, layers=2, heads=4, width=128, dropout=0.0, attention=attention),
        task="flip_flop",
        length=64,
        steps=600,
        batch=32,
        learning_rate=1e-3,
        beta2=0.95,
        evaluations=tuple(
            Evaluation(name, length, examples)
            for length, examples in ((64, 1024), (256, 256), (1024, 128), (4096, 32))
            for name in SETS
        ),
    )

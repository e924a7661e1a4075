"""A run that takes seconds on two cores."""

from tra.model import DecoderConfig
from tra.recipes import Evaluation, Recipe


def digit_sum_small(attention: str = "sliding-window") -> Recipe:
    """Sums of three digits, asked for up to six; a digit is 0 or 1, so that a short run learns something."""
    return Recipe(
        name="digit-sum-small",
        model=DecoderConfig(vocabulary=11, layers=2, heads=2, width=32, dropout=0.0, attention=attention),
        task="digit_sum",
        task_options={"largest": 1},
        length=3,
        steps=60,
        batch=32,
        learning_rate=3e-3,
        evaluations=tuple(Evaluation("sum", length, 100) for length in (3, 6)),
    )

"""TRA and its strongest rivals on strings, trained four times as long as in the table."""

from dataclasses import replace

from tra.experiments.experiment import Experiment
from tra.experiments.scales import shrunk
from tra.experiments.table1 import AIDED, SMALL_SCALE, TABLE1
from tra.recipes import Recipe, RecipeOf

TIMES = 4
TRAINED_ON = ("copy_unique", "induct_recent", "recall", "instructed")


def _longer(recipe_of: RecipeOf) -> RecipeOf:
    def recipe(attention: str = "tra") -> Recipe:
        usual = recipe_of(attention=attention)
        return replace(usual, name=f"{usual.name}-longer", steps=TIMES * usual.steps)

    return recipe


COLUMNS = {column: _longer(SMALL_SCALE[column]) for column in TRAINED_ON}
assert TABLE1.tuning is not None

LONGER = Experiment(
    scales={"smoke": {column: shrunk(recipe_of) for column, recipe_of in COLUMNS.items()}, "small": COLUMNS},
    rows=(
        *("tra", AIDED, "tra-learned", "tra-distance-only", "fot", "stick-breaking", "selective", "cope"),
        *("nape", "ssmax", "asentmax"),
    ),
    seeds=3,
    # As many steps of tuning as the table has.
    tuning=replace(TABLE1.tuning, rounds=tuple((share / TIMES, number) for share, number in TABLE1.tuning.rounds)),
    at_scale={"smoke": {"tuning": None}},
)

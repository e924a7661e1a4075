"""The paper's table: exact match on every synthetic task, for every mechanism."""

from collections.abc import Mapping

from tra.attention import MECHANISMS
from tra.experiments.base import Experiment
from tra.experiments.scales import shrunk
from tra.recipes import RECIPES, RecipeOf
from tra.recipes.rates import SMALL
from tra.recipes.strings import SETS

PAPER: Mapping[str, RecipeOf] = {
    "flip_flop": RECIPES["flip-flop"],
    **{task: RECIPES[task.replace("_", "-")] for task in SETS},
}
SMALL_SCALE: Mapping[str, RecipeOf] = {
    "flip_flop": RECIPES["flip-flop-narrow"],
    **{task: RECIPES[f"{task.replace('_', '-')}-small"] for task in SETS},
}
SMOKE: Mapping[str, RecipeOf] = {task: shrunk(recipe_of) for task, recipe_of in SMALL_SCALE.items()}

TABLE1 = Experiment(
    scales={"smoke": SMOKE, "small": SMALL_SCALE, "paper": PAPER},
    rows=tuple(MECHANISMS),
    seeds=3,
    tuned={"smoke": SMALL, "small": SMALL},
)

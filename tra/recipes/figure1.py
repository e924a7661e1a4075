"""The paper's first figure: attention of TRA beside FoT on the same flip-flop sequence."""

from tra.recipes import table1
from tra.recipes.base import Recipe


def paper() -> dict[str, Recipe]:
    """The table's models."""
    return {"flip_flop": table1.paper()["flip_flop"]}


def small() -> dict[str, Recipe]:
    """The table's models."""
    return {"flip_flop": table1.small()["flip_flop"]}


def smoke() -> dict[str, Recipe]:
    """Seconds."""
    return {"flip_flop": table1.smoke()["flip_flop"]}

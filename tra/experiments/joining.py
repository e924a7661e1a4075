"""Results of the same experiment from elsewhere, beside those of the runs that are here."""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tra.experiments.base import Experiment, Row
from tra.experiments.tuning import Losses
from tra.recipes import Recipe
from tra.report.records import Record


class Joined(NamedTuple):
    """What is stored of the columns and rows that are asked for."""

    records: list[Record]
    rounds: list[Losses]
    """Of each round of tuning, its losses."""
    tuning: dict[str, Any]
    """The evidence of tuning."""
    sessions: list[Any]
    recipes: dict[str, Any]


def joined_results(
    paths: Sequence[Path], experiment: Experiment, scale: str, rows: Sequence[Row], here: Sequence[Record] = ()
) -> Joined:
    """What these `results.json` hold beside what was measured here, and what that alone is without them.

    A run that is in several of them counts as in the first. A ValueError says which file is of something else, and why.
    Of an experiment as it is at the scale and with the columns asked for.
    """
    joined = Joined([], [], {}, [], {})
    columns = experiment.columns(scale)
    labels = [row.label for row in rows]
    seen = {_run(record) for record in here}
    for path in paths:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            recipes = {
                column: Recipe.from_json(json.dumps(recipe))
                for column, recipe in stored["recipes"].items()
                if column in columns
            }
            for column, recipe in recipes.items():
                _check_alike(recipe, columns[column](attention=recipe.model.attention), column, rows)
            found = [
                _record(entry, recipes[entry["column"]])
                for entry in stored["results"]
                if entry["column"] in columns and entry["attention"] in labels
            ]
            new = [record for record in found if _run(record) not in seen]
            seen |= set(map(_run, new))
            for column, row in dict.fromkeys((record.column, record.row) for record in new):
                label = f"{column} {row}"
                if label in stored["tuning"] and label not in joined.tuning:
                    evidence = joined.tuning[label] = stored["tuning"][label]
                    for index, part in enumerate(evidence["rounds"]):
                        joined.rounds.extend([{}] if index == len(joined.rounds) else [])
                        joined.rounds[index][evidence["column"], row] = part["losses"]
            joined.records.extend(new)
            joined.sessions.extend(stored["sessions"])
            joined.recipes.update({column: stored["recipes"][column] for column in recipes})
        except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"join must name results of this experiment, but {path} is something else: {reason}"
            ) from error
    return joined


def all_records(here: Sequence[Record], joined: Joined, places: Sequence[tuple[str, str]]) -> list[Record]:
    """As one experiment with these columns and rows would have them: by seed, column and row."""
    return sorted([*here, *joined.records], key=lambda entry: (entry.seed, places.index((entry.column, entry.row))))


def all_rounds(here: Sequence[Losses], joined: Joined, places: Sequence[tuple[str, str]]) -> list[Losses]:
    """The losses of each round of tuning, likewise."""
    nothing: Losses = {}
    both = [{**theirs, **ours} for ours, theirs in zip_longest(here, joined.rounds, fillvalue=nothing)]
    return [{place: losses[place] for place in places if place in losses} for losses in both]


def _run(record: Record) -> tuple[str, str, int]:
    return record.column, record.row, record.seed


def _record(entry: Mapping[str, Any], recipe: Recipe) -> Record:
    task = recipe.build_task()
    return Record(
        entry["column"],
        entry["attention"],
        entry["seed"],
        recipe.length,
        task.unit,
        task.measure.from_dict(entry),
        entry["tuned"],
        {"learning_rate": entry["learning_rate"], "options": entry["options"]},
    )


def _check_alike(theirs: Recipe, ours: Recipe, column: str, rows: Sequence[Row]) -> None:
    """Raise a ValueError unless both train alike but for the mechanism, what is tuned, and what rows change."""
    free = {"seed", "learning_rate", "model.attention", "model.attention_options"}
    free |= {name for row in rows for name in row.changes}
    for name, (found, expected) in theirs.differences(ours).items():
        if name not in free:
            raise ValueError(f"{name} of {column} is {found!r} there and {expected!r} here")

"""Results of the same experiment from elsewhere, beside those of the runs that are here."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tra.experiments.base import Experiment, Row, as_row
from tra.experiments.tuning import Losses
from tra.recipes import Recipe
from tra.report.records import Record

Place = tuple[str, str]
"""A column and a row."""


class Joined(NamedTuple):
    """What is stored of the columns, rows and seeds that are asked for."""

    records: list[Record]
    failures: dict[str, str]
    """Of runs that are not among the records, why."""
    tuning: dict[Place, dict[str, Any]]
    """The evidence of tuning."""
    sessions: list[Any]
    recipes: dict[str, Any]
    more_seeds: set[int]
    """Those that are stored beyond the ones asked for."""

    @property
    def by_column(self) -> dict[Place, dict[str, Any]]:
        """The evidence of tuning by the column that a row was tuned on."""
        return {(evidence["column"], row): evidence for (_, row), evidence in self.tuning.items()}


def joined_results(
    paths: Sequence[Path],
    experiment: Experiment,
    scale: str,
    rows: Sequence[Row],
    seeds: int,
    here: Sequence[Record] = (),
) -> Joined:
    """What these `results.json` hold beside the records of runs that are here.

    A run that is in several of them counts as in the first. A ValueError says which file is of something else, and why.
    Of an experiment as it is at the scale and with the columns asked for.
    """
    joined = Joined([], {}, {}, [], {}, set())
    seen = {_run(record) for record in here}
    runs = [
        f"{column} {row.label} seed {seed}"
        for column in experiment.columns(scale)
        for row in rows
        for seed in range(seeds)
    ]
    asked = {*runs, *(f"{column} {row.label} (tuning)" for column in experiment.columns(scale) for row in rows)}
    for path in paths:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            found = _records(stored, experiment, scale, rows, seeds)
            new = [record for record in found if _run(record) not in seen]
            for place in dict.fromkeys((record.column, record.row) for record in found):
                _take_evidence(stored["tuning"], place, experiment, joined)
            seen |= set(map(_run, new))
            joined.records.extend(new)
            joined.more_seeds.update(_more_seeds(stored["results"], experiment.columns(scale), rows, seeds))
            joined.sessions.extend(stored["sessions"])
            joined.failures.update({label: why for label, why in stored["failures"].items() if label in asked})
            joined.recipes.update({record.column: stored["recipes"][record.column] for record in new})
        except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"join must name results of this experiment, but {path} differs: {reason}") from error
    for column, row, seed in seen:
        for what in (f"seed {seed}", "(tuning)"):
            joined.failures.pop(f"{column} {row} {what}", None)
    return joined


def all_records(here: Sequence[Record], joined: Joined, places: Sequence[Place]) -> list[Record]:
    """As one experiment with these columns and rows would have them: by seed, column and row."""
    return sorted([*here, *joined.records], key=lambda entry: (entry.seed, places.index((entry.column, entry.row))))


def all_rounds(here: Sequence[Losses], joined: Joined, places: Sequence[Place]) -> list[Losses]:
    """The losses of each round of tuning, likewise; those of a column and row are of one machine."""
    rounds: list[Losses] = [{} for _ in range(max([len(here), *map(_number_of_rounds, joined.tuning.values())]))]
    elsewhere = joined.by_column
    for place in places:
        if place in elsewhere:
            own = [part["losses"] for part in elsewhere[place]["rounds"]]
        else:
            own = [losses[place] for losses in here if place in losses]
        for losses, of_place in zip(rounds, own, strict=False):
            losses[place] = of_place
    return rounds


def tuned_elsewhere(experiment: Experiment, joined: Joined, places: Sequence[Place]) -> dict[Place, dict[str, Any]]:
    """The evidence of how these columns and rows were tuned, of those that were."""
    if experiment.tuning is None:
        return {}
    on = {(column, row): (experiment.tuning.column or column, row) for column, row in places}
    return {place: joined.by_column[where] for place, where in on.items() if where in joined.by_column}


def _number_of_rounds(evidence: Mapping[str, Any]) -> int:
    return len(evidence["rounds"])


def _run(record: Record) -> tuple[str, str, int]:
    return record.column, record.row, record.seed


def _records(
    stored: Mapping[str, Any], experiment: Experiment, scale: str, rows: Sequence[Row], seeds: int
) -> list[Record]:
    columns, by_label = experiment.columns(scale), {row.label: row for row in rows}
    recipes: dict[Place, Recipe] = {}
    records = []
    for entry in stored["results"]:
        column, label = place = entry["column"], entry["attention"]
        if column not in columns or label not in by_label or entry["seed"] not in range(seeds):
            continue
        if place not in recipes:
            _check_column(stored["recipes"][column], experiment, scale, column)
            recipes[place] = by_label[label].recipe(columns[column], 0)
        recipe = recipes[place]
        settings = {"learning_rate": entry["learning_rate"], "options": entry["options"]}
        _check_settings(settings, recipe, _tuned(experiment, label), f"{column} {label}")
        task = recipe.build_task()
        result = task.measure.from_dict(entry)
        records.append(Record(column, label, entry["seed"], recipe.length, task.unit, result, entry["tuned"], settings))
    if not records:
        raise ValueError("it has none of the columns, rows and seeds that are asked for")
    return records


def _more_seeds(
    results: Sequence[Mapping[str, Any]], columns: Collection[str], rows: Sequence[Row], seeds: int
) -> set[int]:
    labels = {row.label for row in rows}
    of_places = [entry for entry in results if entry["column"] in columns and entry["attention"] in labels]
    return {entry["seed"] for entry in of_places if entry["seed"] >= seeds}


def _tuned(experiment: Experiment, row: str) -> set[str]:
    return set(experiment.tuning.grid) if experiment.tuning is not None and experiment.tunes(row) else set()


def _check_column(stored: Mapping[str, Any], experiment: Experiment, scale: str, column: str) -> None:
    """Raise a ValueError unless the recipe that is stored for a column is that of one of our rows."""
    theirs = Recipe.from_json(json.dumps(stored))
    different: list[str] = []
    for row in map(as_row, experiment.rows):
        ours = row.recipe(experiment.columns(scale)[column], theirs.seed)
        free = {
            ".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in _tuned(experiment, row.label)
        }
        differences = {name: pair for name, pair in theirs.differences(ours).items() if name not in free}
        # What the mechanism is, and its options, is compared result by result.
        differences = {name: pair for name, pair in differences.items() if not name.startswith("model.attention")}
        if not differences:
            return
        name, (found, expected) = next(iter(differences.items()))
        different.append(f"{name} of {column} is {found!r} there and {expected!r} here")
    raise ValueError(different[0])


def _check_settings(settings: Mapping[str, Any], recipe: Recipe, tuned: set[str], what: str) -> None:
    """Raise a ValueError unless a result has the settings of its row, but for those that tuning chose."""
    rate, options = settings["learning_rate"], settings["options"]
    if "learning_rate" not in tuned and rate != recipe.learning_rate:
        raise ValueError(f"learning_rate of {what} is {rate!r} there and {recipe.learning_rate!r} here")
    for name in {**options, **recipe.model.attention_options}:
        found, expected = (values.get(name) for values in (options, recipe.model.attention_options))
        if found != expected and f"model.attention_options.{name}" not in tuned:
            raise ValueError(f"{name} of {what} is {found!r} there and {expected!r} here")


def _take_evidence(stored: Mapping[str, Any], place: Place, experiment: Experiment, joined: Joined) -> None:
    """Add what is stored of how a column and row were tuned, which must be how they are tuned here and by the other
    files."""
    column, row = place
    ours = experiment.tuning
    if ours is None or not experiment.tunes(row):
        return
    evidence = stored[f"{column} {row}"]
    for what, found, expected in (
        ("seeds of tuning", list(evidence["seeds"]), list(ours.seeds)),
        (
            "rounds of tuning",
            [part["share_of_steps"] for part in evidence["rounds"]],
            [part for part, _ in ours.rounds],
        ),
        ("column of tuning", evidence["column"], ours.column or column),
        ("what was tuned", sorted(evidence["chosen"]), sorted(ours.grid)),
    ):
        if found != expected:
            raise ValueError(f"{what} of {column} {row} is {found!r} there and {expected!r} here")
    known = joined.by_column.get((evidence["column"], row), evidence)
    if known["chosen"] != evidence["chosen"]:
        raise ValueError(
            f"tuning of {column} {row} chose {evidence['chosen']} there and {known['chosen']} in a file before it"
        )
    joined.tuning.setdefault(place, evidence)

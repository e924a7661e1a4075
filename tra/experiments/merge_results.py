"""Results of the same experiment from elsewhere, beside those of the runs that are here."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tra.experiments.cells import Cell, Place, RunKey
from tra.experiments.grid import Grid
from tra.experiments.results import Results, Session, first_recipes
from tra.experiments.rows import OPTION, Settings
from tra.experiments.tuning import Evidence
from tra.files import read_json
from tra.progress import say
from tra.recipes import Recipe
from tra.report.records import SECOND, Record, without_second


def read_results(paths: Sequence[Path], grid: Grid) -> Results:
    """What these `results.json` hold of a grid. A run that is in several of them counts as in the first.

    A ValueError says which file is of something else, and why.
    """
    found, more_seeds, more_rows = Results(), set[int](), dict[str, None]()
    for path in paths:
        try:
            seeds, others = _add_file(read_json(path), grid, found)
            more_seeds, more_rows = more_seeds | seeds, more_rows | others
        except FileNotFoundError as error:
            raise ValueError(f"join must name files that exist, got {path}") from error
        except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"join must name results of this experiment, but {path} differs: {reason}") from error
    if more_seeds:
        say(f"what is joined has more seeds than are shown; --seeds {max(more_seeds) + 1} takes them in")
    if more_rows and list(grid.rows) == list(grid.every_row):
        names = ", ".join(more_rows)
        say(f"what is joined has rows that are left out; --attention with all rows takes them in: {names}")
    return found


def in_current_rows(
    records: Mapping[RunKey, list[Record]], grid: Grid, evidence: Mapping[Place, Evidence]
) -> dict[RunKey, list[Record]]:
    """Joined results, each in the row of its settings: more seeds of tuning may have swapped the first and the second
    choice. Results with the settings of neither are left out."""
    found: dict[RunKey, list[Record]] = {}
    left_out = set()
    for key, of_run in records.items():
        known = evidence.get(grid.tuned_on(key.place))
        first = without_second(key.row)
        if known is None or known.chosen is None or not _records_hold(known.chosen):
            row = key.row
        elif _matches(of_run[0], known.chosen):
            row = first
        elif known.second is not None and _matches(of_run[0], known.second):
            row = first + SECOND
        else:
            left_out.add(str(key.place))
            continue
        found[key._replace(row=row)] = [replace(record, row=row) for record in of_run]
    for place in sorted(left_out):
        say(f"results of {place} that are joined have settings that tuning did not choose; they are left out")
    return found


def _records_hold(settings: Collection[str]) -> bool:
    """Whether records hold all of these settings: they have the learning rate and options, and nothing else."""
    return all(name == "learning_rate" or name.startswith(OPTION) for name in settings)


def _matches(record: Record, settings: Settings) -> bool:
    known = {"learning_rate": record.learning_rate, **{OPTION + name: value for name, value in record.options.items()}}
    return all(known.get(name) == value for name, value in settings.items())


def merge_results(here: Results, elsewhere: Results, cells: Sequence[Cell]) -> Results:
    """The results of these runs, from here and elsewhere. A run that is in both counts as it is here."""
    records = elsewhere.records | here.records
    runs, tuned = {str(key) for key in records}, {f"{key.place} (tuning)" for key in records}
    failures = {name: reason for name, reason in elsewhere.failures.items() if name not in runs | tuned}
    finished = [cell for cell in cells if cell.key in here.records]
    return Results(
        records={cell.key: records[cell.key] for cell in cells if cell.key in records},
        failures=failures | {name: reason for name, reason in here.failures.items() if name not in runs},
        tuning=elsewhere.tuning | here.tuning,
        sessions=_without_repeats([*elsewhere.sessions, *here.sessions]),
        recipes=first_recipes(cells) | elsewhere.recipes | first_recipes(finished),
    )


def _without_repeats(sessions: Sequence[Session]) -> list[Session]:
    """Each session once: a file may hold those of files that were joined to it before."""
    return [session for place, session in enumerate(sessions) if session not in sessions[:place]]


def _add_file(stored: Mapping[str, Any], grid: Grid, found: Results) -> tuple[set[int], dict[str, None]]:
    """Add the results of a file; returns its seeds and its rows that the grid does not have."""
    rows = {label: row for row in grid.rows for label in (row.label, row.label + SECOND)}
    recipes: dict[Place, Recipe] = {}
    in_column: dict[str, Recipe] = {}
    records: dict[RunKey, list[Record]] = {}
    more_seeds, more_rows = set[int](), dict[str, None]()
    for entry in stored["results"]:
        place, seed = Place(entry["column"], entry["attention"]), entry["seed"]
        if place.column not in grid.columns:
            continue
        if place.row not in rows:
            more_rows[place.first_choice.row] = None
            continue
        if seed not in range(grid.seeds):
            more_seeds.add(seed)
            continue
        if place not in recipes:
            in_column[place.column] = _recipe(stored["recipes"][place.column])
            _check_column(in_column[place.column], grid, place.column)
            recipes[place] = grid.recipe(place.column, rows[place.row], 0)
        recipe = recipes[place]
        task = recipe.build_task()
        result, rate = task.measure.from_dict(entry), entry["learning_rate"]
        # Version 0.1 stored neither: the options were those of the column, and tuning was an experiment of its own.
        options = entry["options"] if "options" in entry else in_column[place.column].model.attention_options
        record = Record(*place, seed, recipe.length, task.unit, result, entry.get("tuned", False), rate, options)
        _check_settings(record, recipe, grid.tuned_fields(rows[place.row]))
        records.setdefault(RunKey(*place, seed), []).append(record)
    for key, of_run in records.items():
        _check_whole(key, of_run, recipes[key.place])
    for place in dict.fromkeys(place.first_choice for place in recipes):
        if grid.tunes(place.row):
            fields = grid.tuned_fields(rows[place.row])
            evidence = Evidence.from_dict(stored["tuning"][str(place)])
            if set(evidence.chosen or ()) < fields:
                more = ", ".join(sorted(fields - set(evidence.chosen or ())))
                say(f"results of {place} that are joined are left out: {more} is tuned here and was not there")
                records = {key: of_run for key, of_run in records.items() if key.place.first_choice != place}
            else:
                _add_evidence(evidence, place, grid, fields, found)
    if not records:
        raise ValueError("it has none of the columns, rows and seeds that are asked for")
    for key, of_run in records.items():
        kept_as = _place_for(key, of_run, found, _records_hold(grid.tuned_fields(rows[key.row])))
        if kept_as is not None:
            found.records[kept_as] = of_run
            found.recipes[key.column] = in_column[key.column]
    found.sessions += map(Session.from_dict, stored["sessions"])
    asked = {
        str(RunKey(column, label, seed)) for column in grid.columns for label in rows for seed in range(grid.seeds)
    }
    asked |= {f"{place} (tuning)" for place in grid.places}
    found.failures |= {name: why for name, why in stored["failures"].items() if name in asked}
    return more_seeds, more_rows


def _place_for(key: RunKey, of_run: Sequence[Record], found: Results, told: bool) -> RunKey | None:
    """Where to keep a run; None where it is known already.

    Tuning on more seeds may have put other settings in the first row than a file before it has there. Where results
    tell the settings, both are kept, and `in_current_rows` finds their rows.
    """
    first = key.place.first_choice.row
    other = key._replace(row=first + SECOND if key.row == first else first)
    places = [key, other] if told else [key]
    if told and any(_settings(found.records[place]) == _settings(of_run) for place in places if place in found.records):
        return None
    return next((place for place in places if place not in found.records), None)


def _settings(of_run: Sequence[Record]) -> tuple[float, Mapping[str, Any]]:
    return of_run[0].learning_rate, of_run[0].options


def _check_whole(key: RunKey, of_run: Sequence[Record], recipe: Recipe) -> None:
    """Raise a ValueError unless a run has each evaluation of its recipe once: a mean would not show the difference."""
    problem = f"{key} must hold every evaluation of its recipe once, got"
    wanted = {(entry.name, entry.length, entry.stride): entry.examples for entry in recipe.evaluations}
    for result in (record.result for record in of_run):
        place = result.set, result.length, result.stride
        if place not in wanted:
            raise ValueError(f"{problem} {result.set_label} {result.length} twice, or without need")
        if result.examples != wanted.pop(place):
            raise ValueError(f"{problem} {result.set_label} {result.length} of {result.examples} sequences")
    for name, length, _ in wanted:
        raise ValueError(f"{problem} no {name} {length}")


def _recipe(stored: Mapping[str, Any]) -> Recipe:
    return Recipe.from_json(json.dumps(stored))


def _check_column(theirs: Recipe, grid: Grid, column: str) -> None:
    """Raise a ValueError unless the recipe that is stored for a column is that of one of our rows."""
    different: list[str] = []
    for row in grid.every_row:
        ours = grid.recipe(column, row, theirs.seed)
        free = {".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in grid.tuned_fields(row)}
        differences = {name: pair for name, pair in theirs.differences(ours).items() if name not in free}
        # What the mechanism is, and its options, is compared result by result.
        differences = {name: pair for name, pair in differences.items() if not name.startswith("model.attention")}
        if not differences:
            return
        name, (found, expected) = next(iter(differences.items()))
        different.append(f"{name} of {column} is {found!r} there and {expected!r} here")
    raise ValueError(different[0])


def _check_settings(record: Record, recipe: Recipe, tuned: set[str]) -> None:
    """Raise a ValueError unless a result has the settings of its row; those that tuning chooses may differ."""
    rate, options, what = record.learning_rate, record.options, f"{record.column} {record.row}"
    if "learning_rate" not in tuned and rate != recipe.learning_rate:
        raise ValueError(f"learning_rate of {what} is {rate!r} there and {recipe.learning_rate!r} here")
    for name in {**options, **recipe.model.attention_options}:
        found, expected = (values.get(name) for values in (options, recipe.model.attention_options))
        if found != expected and f"model.attention_options.{name}" not in tuned:
            raise ValueError(f"{name} of {what} is {found!r} there and {expected!r} here")


def _add_evidence(theirs: Evidence, place: Place, grid: Grid, fields: set[str], found: Results) -> None:
    """Add how a column and row were tuned. That must be as they are tuned here and in the other files, but seeds may be
    missing: they are trained here."""
    ours, tuned_on = grid.tuning, grid.tuned_on(place)
    assert ours is not None
    for what, stored, expected in (
        ("seeds of tuning", list(theirs.seeds), list(ours.seeds)[: max(1, len(theirs.seeds))]),
        ("rounds of tuning", [part.share_of_steps for part in theirs.rounds], [share for share, _ in ours.rounds]),
        ("column of tuning", theirs.column, tuned_on.column),
        ("what was tuned", sorted(theirs.chosen or ()), sorted(fields)),
    ):
        if stored != expected:
            raise ValueError(f"{what} of {place} is {stored!r} there and {expected!r} here")
    known = found.tuning.setdefault(tuned_on, theirs)
    as_sure = len(theirs.seeds) == len(known.seeds)
    if known.chosen != theirs.chosen and (as_sure or not _records_hold(fields)):
        raise ValueError(f"tuning of {place} chose {theirs.chosen} there and {known.chosen} in a file before it")
    if len(theirs.seeds) > len(known.seeds):
        found.tuning[tuned_on] = theirs  # in_current_rows finds the rows of what was tuned on fewer

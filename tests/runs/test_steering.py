"""Steering a run: weights to begin with, extending, validation, the best checkpoint, early stopping, no measuring."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tra.runs.training
from tests.runs.tiny import TINY, checkpoints, logged, weights
from tra.model import Decoder
from tra.recipes import Evaluation, Recipe
from tra.runs import evaluate, load_run, train
from tra.runs.batches import training_batches
from tra.runs.evaluation import measure
from tra.runs.step import summed_loss

SHORT = replace(TINY, steps=6, checkpoint_every=3, evaluations=(Evaluation("iid", 16, 5), Evaluation("dense", 32, 4)))
SCHEDULES: list[dict[str, Any]] = [{"schedule": "constant"}, {"schedule": "wsd", "decay": 0.5}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run to begin from. Not to be written to."""
    return train(SHORT, tmp_path_factory.mktemp("source") / "run").folder


# Weights to begin with


def first_loss(recipe: Recipe, model: Decoder) -> float:
    batch = training_batches(recipe, recipe.build_task())(0)
    model.eval()
    return summed_loss(model, batch.to(torch.device("cpu"))).item() / int(batch.counted[:, 1:].sum())


def test_training_begins_with_the_weights_of_another_run(source: Path, tmp_path: Path) -> None:
    recipe = replace(SHORT, model=replace(SHORT.model, dropout=0.0), seed=5, init_from=str(source))
    run = train(recipe, tmp_path / "run", measure=False)
    assert run.metrics()[0]["loss"] == pytest.approx(first_loss(recipe, load_run(source).model), rel=1e-5)
    fresh = train(replace(recipe, init_from=None), tmp_path / "fresh", measure=False)
    assert fresh.metrics()[0]["loss"] != pytest.approx(run.metrics()[0]["loss"], rel=1e-2)


def test_a_run_that_began_with_other_weights_goes_on_without_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint, and the other run is gone: the same bits."""
    shutil.copytree(source, tmp_path / "source")
    recipe = replace(SHORT, seed=5, init_from=str(tmp_path / "source"))
    train(recipe, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(tra.runs.training._Trainer, "_take_steps", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            train(recipe, tmp_path / "killed")
    assert checkpoints(tmp_path / "killed") == [0]
    shutil.rmtree(tmp_path / "source")
    train(load_run(tmp_path / "killed").recipe, tmp_path / "killed")
    assert weights(tmp_path / "killed", 6) == weights(tmp_path / "whole", 6)
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")


def test_training_begins_with_an_exported_model(source: Path, tmp_path: Path) -> None:
    from tra.hub.export import export

    export(source, tmp_path / "exported")
    recipe = replace(SHORT, steps=1, init_from=str(tmp_path / "exported"), evaluations=())
    train(recipe, tmp_path / "run")
    exported = load_run(f"{tmp_path / 'run'}@0").model.state_dict()
    for name, tensor in load_run(source).model.state_dict().items():
        assert torch.equal(exported[name], tensor)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"width": 16},
            r"init_from must fit the model: .* is \[.*32\] there and \[.*16\] here, and \d+ others differ too .*; "
            r"the configs differ in model\.width \(32, here 16\)",
        ),
        ({"layers": 1}, r"blocks\.1\..* there and missing here, .* differ in model.layers \(2, here 1\)"),
        ({"attention": "rope"}, r"blocks\.0\.attention\.gate\..* and missing here"),
    ],
)
def test_weights_that_do_not_fit_are_named_before_anything_is_made(
    source: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    recipe = replace(SHORT, model=replace(SHORT.model, **changes), init_from=str(source))
    with pytest.raises(ValueError, match=message):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.json").exists()


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_what_is_no_model_is_named(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "other")
    recipe = replace(SHORT, init_from=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"init_from must be a run or a folder with .*, got .*other"):
        train(recipe, tmp_path / "run")
    with pytest.raises(ValueError, match=r"pretrained must be one of .*, got 'flop'"):
        train(replace(SHORT, init_from="pretrained:flop"), tmp_path / "run")


def test_a_model_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "adopted").mkdir()
    (tmp_path / "adopted" / "config.json").write_text('{"model_type": "tra_llama"}')
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "adopted" / "model.safetensors")
    with pytest.raises(ValueError, match=r"got a model of type 'tra_llama' .* tra adopt MODEL FOLDER --heal TEXT"):
        train(replace(SHORT, init_from=str(tmp_path / "adopted")), tmp_path / "run")


# Extending


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["constant", "wsd"])
def test_an_extended_run_is_the_one_that_was_planned_so(tmp_path: Path, schedule: dict[str, Any]) -> None:
    """In weights, optimizer and metrics, whether it was finished or in the middle."""
    short = replace(TINY, steps=8, warmup=0.25, checkpoint_every=3, **schedule)
    planned = short.extended(12)
    train(planned, tmp_path / "planned")
    train(short, tmp_path / "extended")
    run = train(load_run(tmp_path / "extended").recipe.extended(12), tmp_path / "extended")
    assert run.step == 12
    assert weights(tmp_path / "extended", 12) == weights(tmp_path / "planned", 12)
    assert logged(tmp_path / "extended") == logged(tmp_path / "planned")
    assert load_run(tmp_path / "extended").recipe == planned
    assert load_run(tmp_path / "extended").finished(planned) is not None
    assert checkpoints(tmp_path / "extended") == checkpoints(tmp_path / "planned")


def test_a_kill_while_a_run_is_extended_leaves_the_shorter_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(TINY, steps=8, schedule="wsd", decay=0.5, checkpoint_every=3)
    train(short, tmp_path / "run")
    before = weights(tmp_path / "run", 8)
    with monkeypatch.context() as patch:
        patch.setattr("tra.runs.folder.write_text", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            train(short.extended(12), tmp_path / "run")
    assert load_run(tmp_path / "run").recipe == short
    assert checkpoints(tmp_path / "run") == [4]
    train(short, tmp_path / "run")
    assert weights(tmp_path / "run", 8) == before


def test_what_cannot_be_extended_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="schedule must be 'constant' or 'wsd' for a run to be extended"):
        TINY.extended(99)
    with pytest.raises(ValueError, match="steps must be more than the 40 of the run to extend it, got 40"):
        replace(TINY, schedule="constant").extended(40)
    short = replace(TINY, steps=4, schedule="wsd", decay=0.5, checkpoint_every=4, keep_checkpoints=1)
    train(short, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    with pytest.raises(ValueError, match=r"needs a checkpoint of step 2 or earlier, .* and has 4"):
        train(short.extended(8), tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [4]


# Validation

VALIDATED = replace(TINY, steps=12, learning_rate=3e-3, validate_every=4, validation=("iid@16:6", "dense@8:5"))


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    return train(replace(VALIDATED, keep_checkpoints=1), tmp_path_factory.mktemp("validated") / "run").folder


def test_validation_measures_the_named_sets_as_evaluation_does(validated: Path) -> None:
    run = load_run(validated)
    entries = [entry for entry in run.metrics() if "validation/loss" in entry]
    assert [entry["step"] for entry in entries] == [4, 8, 12]
    model, task = run.model, run.task
    iid, dense = (measure(model, task, Evaluation(*parts)) for parts in (("iid", 16, 6), ("dense", 8, 5)))
    last = entries[-1]
    for name in ("loss", "exact_match", "token_accuracy"):
        assert last[f"validation/iid@16/{name}"] == pytest.approx(getattr(iid, name))
        assert last[f"validation/dense@8/{name}"] == pytest.approx(getattr(dense, name))
        assert last[f"validation/{name}"] == pytest.approx((getattr(iid, name) + getattr(dense, name)) / 2)
    assert {"loss", "learning_rate", "gradient_norm", "tokens_per_second"} <= set(last)


def test_validation_changes_no_bit_of_training(validated: Path, tmp_path: Path) -> None:
    train(replace(VALIDATED, validate_every=None, validation=()), tmp_path / "run", measure=False)
    assert weights(tmp_path / "run", 12)["model.safetensors"] == weights(validated, 12)["model.safetensors"]


def test_validation_in_mixed_precision_changes_no_bit_either(tmp_path: Path) -> None:
    recipe = replace(VALIDATED, steps=6, precision="bf16")
    train(recipe, tmp_path / "with", measure=False)
    train(replace(recipe, validate_every=None), tmp_path / "without", measure=False)
    assert weights(tmp_path / "with", 6)["model.safetensors"] == weights(tmp_path / "without", 6)["model.safetensors"]


def test_a_killed_run_validates_and_keeps_the_best_as_one_that_never_was(
    validated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the line of a validation and its checkpoint."""
    recipe, original = replace(VALIDATED, keep_checkpoints=1), tra.runs.training._Trainer._save

    def save(trainer: Any, step: int) -> None:
        if step == 8:
            pytest.fail("killed")
        original(trainer, step)

    with monkeypatch.context() as patch:
        patch.setattr(tra.runs.training._Trainer, "_save", save)
        with pytest.raises(pytest.fail.Exception, match="killed"):
            train(recipe, tmp_path / "run")
    assert [entry["step"] for entry in logged(tmp_path / "run") if "validation/loss" in entry] == [4, 8]
    train(recipe, tmp_path / "run")
    assert logged(tmp_path / "run") == logged(validated)
    assert checkpoints(tmp_path / "run") == checkpoints(validated)


def worse_later(monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    """Let validation find the loss lowest at a step, and the exact match highest two steps later."""
    original = tra.runs.training._Trainer._validate

    def validate(trainer: Any, done: int) -> dict[str, float]:
        found = original(trainer, done)
        return {**found, "validation/loss": abs(done - best) + 0.5, "validation/exact_match": -abs(done - best - 2)}

    monkeypatch.setattr(tra.runs.training._Trainer, "_validate", validate)


def test_the_best_checkpoint_is_kept_and_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worse_later(monkeypatch, 4)
    recipe = replace(VALIDATED, validate_every=2, keep_checkpoints=1, checkpoint_every=100)
    train(recipe, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [4, 12]
    assert load_run(tmp_path / "run").step == 12
    best = load_run(f"{tmp_path / 'run'}@best")
    assert (best.step, best.best_step()) == (4, 4)
    assert not torch.equal(best.model.head.weight, load_run(tmp_path / "run").model.head.weight)
    assert torch.equal(best.model.head.weight, load_run(f"{tmp_path / 'run'}@4").model.head.weight)
    evaluation = {"sets": ["iid"], "lengths": [16], "examples": 3}
    assert evaluate(f"{tmp_path / 'run'}@best", **evaluation) == evaluate(best, **evaluation)
    with pytest.raises(ValueError, match=r"checkpoint must be one of steps 4, 12 in .*, got 7"):
        _ = load_run(f"{tmp_path / 'run'}@7").model
    train(replace(recipe, watch="exact_match"), tmp_path / "other", measure=False)
    assert checkpoints(tmp_path / "other") == [6, 12]


def test_training_stops_early_and_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worse_later(monkeypatch, 4)
    recipe = replace(VALIDATED, validate_every=2, patience=2, evaluations=(Evaluation("iid", 16, 3),))
    run = train(recipe, tmp_path / "run")
    assert (run.step, run.steps_done(), load_run(run.folder).step) == (8, 8, 8)
    assert load_run(run.folder).finished(recipe) == run.results != []
    assert 4 in checkpoints(run.folder)
    before = logged(run.folder)
    (run.folder / "results.json").unlink()
    again = train(recipe, run.folder)
    assert (again.step, len(again.results), logged(run.folder)) == (8, 1, before)


def test_a_run_without_validation_has_no_best(source: Path) -> None:
    with pytest.raises(ValueError, match="has no best checkpoint: it was trained without validate_every"):
        _ = load_run(f"{source}@best").model


def test_validation_is_on_sets_within_the_training_length_unless_told(source: Path) -> None:
    recipe = replace(SHORT, validate_every=3)
    assert recipe.validation_sets(recipe.build_task()) == [Evaluation("iid", 16, 5)]
    named = replace(recipe, validation=("sparse", "dense@32"))
    assert named.validation_sets(named.build_task()) == [Evaluation("sparse", 16, 100), Evaluation("dense", 32, 4)]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"validate_every": 0}, "validate_every must be at least 1, got 0"),
        ({"validate_every": 2}, "validation must name sets to validate on: the recipe has no evaluations"),
        ({"validate_every": 2, "validation": ("idd",)}, "validation must be one of .*, got 'idd'; did you mean 'iid'"),
        ({"validate_every": 2, "validation": ("iid@x",)}, "validation must be NAME, NAME@LENGTH or .*, got 'iid@x'"),
        ({"validate_every": 2, "validation": ("iid@3",)}, "length must be an even number"),
        (
            {"validate_every": 2, "validation": ("iid",), "watch": "perplexity"},
            "watch must be one of exact_match, loss, token_accuracy, got 'perplexity'",
        ),
        ({"patience": 3}, "patience must be given with validate_every"),
        ({"schedule": "cosin"}, "schedule must be 'cosine' or 'constant' or 'wsd', got 'cosin'; did you mean 'cosine'"),
        ({"warmup_steps": 99}, "warmup_steps must be between 0 and the 40 steps, got 99"),
        ({"decay": 2.0}, r"decay must be a share of the steps in \[0, 1\], got 2.0"),
    ],
)
def test_what_is_wrong_with_the_steering_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_a_recipe_with_all_of_it_is_read_back(tmp_path: Path) -> None:
    recipe = replace(VALIDATED, patience=3, watch="token_accuracy", schedule="wsd", warmup_steps=2, init_from="x")
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_without_measuring_nothing_is_measured_until_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tra.runs.training, "measure_all", lambda *_: pytest.fail("measured"))
        run = train(SHORT, tmp_path / "run", measure=False)
    assert run.results == []
    assert run.finished(SHORT) is None
    assert len(train(SHORT, tmp_path / "run").results) == 2

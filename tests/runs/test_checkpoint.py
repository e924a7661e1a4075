"""Checkpoints appear whole or not at all; damaged ones are passed over, and what cannot be read is never replaced."""

import builtins
import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.tiny import TINY, checkpoints, weights
from tra.errors import RunError
from tra.runs import load_run, train
from tra.runs.checkpoint import Checkpoints


def test_a_run_with_tied_embeddings_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    recipe = replace(TINY, steps=8, model=replace(TINY.model, tied_embeddings=True))
    whole = train(recipe, tmp_path / "run").model
    assert checkpoints(tmp_path / "run") == [4, 8]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    found = train(recipe, tmp_path / "run").model
    assert found.head.weight is found.embedding.weight
    assert all(torch.equal(tensor, found.state_dict()[key]) for key, tensor in whole.state_dict().items())


@pytest.mark.parametrize("damage", ["truncate", "flip", "state", "missing"])
def test_damaged_checkpoint_is_reported_and_the_one_before_used(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "run"
    recipe = replace(TINY, steps=8)
    whole = {name: tensor.clone() for name, tensor in train(recipe, folder).model.state_dict().items()}
    newest = folder / "checkpoints" / "step-00000008"
    file = newest / "model.safetensors"
    if damage == "truncate":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "flip":
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    elif damage == "state":
        (newest / "state.json").write_text("{")
    else:
        file.unlink()
    with pytest.warns(UserWarning, match="checkpoint .*step-00000008 is damaged .*: using the one before"):
        model = train(recipe, folder).model
    assert checkpoints(folder) == [4, 8]
    assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items())


def test_checkpoints_after_damage_are_kept_and_strangers_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(replace(TINY, steps=12), folder)
    shutil.copytree(folder / "checkpoints" / "step-00000008", folder / "checkpoints" / "step-best")
    for step in (8, 12):
        (folder / "checkpoints" / f"step-{step:08d}" / "state.json").unlink()
    (folder / "recipe.json").write_text(replace(TINY, steps=4).to_json())
    with pytest.warns(UserWarning, match="is damaged"):
        train(replace(TINY, steps=4), folder)
    assert checkpoints(folder) == [4]
    assert (folder / "checkpoints" / "step-best").exists()


PARTS = {"model": {"weight": torch.arange(6.0).view(2, 3)}, "optimizer": {"exp_avg/weight": torch.ones(2, 3)}}


def test_what_is_saved_comes_back_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "checkpoints")
    assert saved.latest() is None
    assert saved.describe_last() == "there is no earlier checkpoint"
    for step in (5, 10, 15):
        saved.save(step, PARTS, keep=2)
    latest = saved.latest()
    assert latest is not None
    assert (latest.step, latest.path) == (15, tmp_path / "checkpoints" / "step-00000015")
    for name, tensors in PARTS.items():
        for key, tensor in tensors.items():
            assert torch.equal(latest.tensors(name)[key], tensor)
    assert checkpoints(tmp_path) == [10, 15]
    assert saved.describe_last() == f"the last good checkpoint is {latest.path}"


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    latest = Checkpoints(tmp_path).save(1, PARTS, keep=1)
    assert {path.name for path in latest.path.iterdir()} == {
        *("model.safetensors", "optimizer.safetensors", "state.json")
    }


def test_tensors_outlive_their_file(tmp_path: Path) -> None:
    latest = Checkpoints(tmp_path).save(1, PARTS, keep=1)
    tensors = latest.tensors("model")
    os.truncate(latest.path / "model.safetensors", 0)
    assert torch.equal(tensors["weight"], PARTS["model"]["weight"])


def test_a_checkpoint_of_another_format_is_passed_over(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    latest = saved.save(1, PARTS, keep=2)
    saved.save(2, PARTS, keep=2)
    state = tmp_path / "step-00000002" / "state.json"
    state.write_text(state.read_text().replace('"format": 1', '"format": 2'))
    with pytest.warns(UserWarning, match="is damaged \\(its format is 2, expected 1\\): using the one before"):
        assert saved.latest() == latest


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_stops_the_run_and_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder, recipe = tmp_path / "run", replace(TINY, steps=8)
    train(recipe, folder)
    before = {step: weights(folder, step) for step in (4, 8)}
    original = builtins.open

    def failing(file: Any, *arguments: Any, **options: Any) -> Any:
        if "step-00000008/model" in str(file):
            raise OSError(number, os.strerror(number), str(file))
        return original(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", failing)
        with pytest.raises(RunError, match=f"step-00000008 could not be read .*{os.strerror(number)}.* move it away"):
            train(recipe, folder)
        assert os.strerror(number) in Checkpoints(folder / "checkpoints").describe_last()
    assert {step: weights(folder, step) for step in (4, 8)} == before


def test_a_folder_of_checkpoints_that_cannot_be_read_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(1, PARTS, keep=1)

    def refused(path: Any = ".") -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refused)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(RunError, match=r"could not be read: .*Permission denied"):
        saved.latest()


def test_only_what_was_found_damaged_is_removed_from_later_steps(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(8, PARTS, keep=1)
    Checkpoints(tmp_path).save(4, PARTS, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000004", "step-00000008"}


def test_weights_have_the_permissions_of_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved = Checkpoints(tmp_path).save(1, PARTS, keep=1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in saved.path.iterdir()} == {0o640}


@pytest.mark.parametrize("change", [{"seed": 1}, {"learning_rate": 2e-3}])
def test_a_checkpoint_of_another_run_is_refused_and_kept(tmp_path: Path, change: dict[str, Any]) -> None:
    recipe = replace(TINY, steps=4)
    train(recipe, tmp_path / "one")
    train(recipe.changed(change), tmp_path / "other")
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "one" / "checkpoints")
    for use in (lambda: train(recipe, tmp_path / "one"), lambda: load_run(tmp_path / "one").model):
        with pytest.raises(RunError, match="step-00000004 is of a run with another recipe or seed: move it away"):
            use()
    assert weights(tmp_path / "one", 4) == weights(tmp_path / "other", 4)


def test_a_checkpoint_that_says_nothing_of_its_run_is_taken_if_it_fits(tmp_path: Path) -> None:
    """As those of version 0.1."""
    folder, recipe = tmp_path / "run", replace(TINY, steps=4)
    train(recipe, folder)
    state = folder / "checkpoints" / "step-00000004" / "state.json"
    stored = json.loads(state.read_text())
    assert stored.pop("run") == load_run(folder).identity
    state.write_text(json.dumps(stored))
    assert load_run(folder).model is not None
    wider = recipe.changed({"model.width": 64})
    (folder / "recipe.json").write_text(wider.to_json())
    for use in (lambda: train(wider, folder), lambda: load_run(folder).model):
        with pytest.raises(RunError, match=r"does not fit the run's model: blocks\.0\..* is \[.*32\], not \[.*64\]"):
            use()


@pytest.mark.parametrize(
    "hostile",
    [
        {"step": 10**30},
        {"step": -5},
        {"step": None},
        {"files": {}},
        {"files": []},
        {"files": {"/dev/zero": "0"}},
        {"files": {"../step-00000001/model.safetensors": "0", "optimizer.safetensors": "0"}},
    ],
)
def test_a_hostile_state_is_damage(tmp_path: Path, hostile: dict[str, Any]) -> None:
    saved = Checkpoints(tmp_path)
    good = saved.save(1, PARTS, keep=2)
    saved.save(2, PARTS, keep=2)
    state = tmp_path / "step-00000002" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), **hostile}))
    with pytest.warns(UserWarning, match=r"is damaged \((its|state\.json) .*\): using the one before"):
        assert saved.latest() == good


def test_a_state_nested_without_end_is_damage(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(1, PARTS, keep=2)
    (tmp_path / "step-00000001" / "state.json").write_text("[" * 100_000)
    with pytest.warns(UserWarning, match=r"is damaged \(state\.json is no intact JSON"):
        assert saved.latest() is None


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    saved = Checkpoints(tmp_path)
    pipe = saved.save(1, PARTS, keep=2).path / name
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(RunError, match=r"could not be read .*Not a regular file"):
        saved.latest()


def test_what_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path).save(1, PARTS, keep=2)
    (saved.path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(RunError, match=r"model of checkpoint .*step-00000001 is no intact safetensors file"):
        saved.tensors("model")

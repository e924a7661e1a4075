"""Checkpoints appear whole or not at all; damaged ones are passed over."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runs.tiny import TINY, checkpoints
from tra.runs import train
from tra.runs.checkpoint import Checkpoints


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

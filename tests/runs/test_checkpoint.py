"""Checkpoints appear whole or not at all; damaged ones are passed over."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runs.tiny import TINY, checkpoints
from tra.runs import train


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

"""Several processes, with replicas or shards of the model, give what one gives."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.runs.tiny import TINY, begin, checkpoints, launched, logged
from tra.runs import Run, train
from tra.tasks import Evaluation


def assert_same_run(folder: Path, other: Path, steps: int) -> None:
    """Up to rounding."""
    weights = [load_file(path / f"checkpoints/step-{steps:08d}/model.safetensors") for path in (folder, other)]
    assert_close(*weights, rtol=1e-4, atol=1e-6)
    metrics = [logged(path) for path in (folder, other)]
    assert len(metrics[0]) == steps
    for left, right in zip(*metrics, strict=True):
        # AdamW and clipping hide a wrong factor on the gradient from the weights, but not from its norm.
        assert left == pytest.approx(right, rel=1e-4)


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FSDP = ["accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2", "--num_processes=2"]
FSDP += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]  # or it warns that these are defaults


@pytest.mark.parametrize(
    "launcher, one, two",
    [
        (TORCHRUN, {}, {"accumulate": 2, "gradient_checkpointing": True}),
        # In pieces, so that low precision rounds the same sums.
        (FSDP, {"precision": "bf16", "accumulate": 2}, {"precision": "bf16"}),
    ],
    ids=["replicas that save memory", "shards in low precision"],
)
def test_two_processes_give_the_weights_of_one(
    tmp_path: Path, launcher: list[str], one: dict[str, Any], two: dict[str, Any]
) -> None:
    sets = (Evaluation("iid", 16, 20), Evaluation("sparse", 16, 20))
    recipe = replace(TINY, model=replace(TINY.model, dropout=0.0), steps=12, evaluations=sets, validate_every=6)
    train(replace(recipe, **one), tmp_path / "one")
    begin(replace(recipe, **two), tmp_path / "two")
    launched(launcher, "-m", "tra", "train", "--resume", str(tmp_path / "two"))
    assert_same_run(tmp_path / "two", tmp_path / "one", 12)
    validated = [entry["step"] for entry in logged(tmp_path / "two") if "validation/loss" in entry]
    assert validated == [6, 12], "all processes validate, and agree on which checkpoint is best"
    assert Run(tmp_path / "two").watched().best == Run(tmp_path / "one").watched().best
    # Both wrote what they measured, of the same sequences.
    measured = [Run(tmp_path / name).results for name in ("one", "two")]
    assert [(x.set, x.length, x.examples) for x in measured[0]] == [(x.set, x.length, x.examples) for x in measured[1]]
    assert len(measured[0]) == 2


def test_shards_go_on_from_one_process_and_one_process_from_shards(tmp_path: Path) -> None:
    recipe = replace(TINY, model=replace(TINY.model, dropout=0.0), steps=12, keep_checkpoints=3)
    train(recipe, tmp_path / "one")
    recipe = replace(recipe, accumulate=2, gradient_checkpointing=True)
    folder, script = tmp_path / "run", str(Path(__file__).with_name("sharded_run.py"))
    begin(recipe, folder)
    shutil.copy(tmp_path / "one" / "metrics.jsonl", folder)
    shutil.copytree(tmp_path / "one/checkpoints/step-00000004", folder / "checkpoints/step-00000004")
    launched(FSDP, script, str(folder), "7")
    assert checkpoints(folder) == [4, 7]
    shutil.copytree(folder, tmp_path / "again one")
    train(recipe, tmp_path / "again one")
    launched(FSDP, script, str(folder), "12")
    for path in (folder, tmp_path / "again one"):
        assert_same_run(path, tmp_path / "one", 12)


def test_every_process_measures_its_part(tmp_path: Path) -> None:
    sets = (Evaluation("iid", 256, 300), Evaluation("sparse", 64, 1))  # 5 batches, of which one process gets 3; and 1
    recipe = replace(TINY, steps=2, evaluations=sets)
    alone = train(recipe, tmp_path / "run").results
    script = str(Path(__file__).with_name("counted_evaluation.py"))
    launched(TORCHRUN, script, str(tmp_path / "run"), str(tmp_path))
    predicted = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [found["batches"] for found in predicted] == [4, 2]
    for found in predicted:
        assert found["results"] == [result.to_dict() for result in alone]


def test_batch_that_cannot_be_divided_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch must be a multiple of processes x accumulate = 1 x 3, got 8"):
        train(replace(TINY, accumulate=3), tmp_path)

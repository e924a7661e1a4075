"""Training with sequences that several processes share gives the weights of one process."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runs.test_distributed import FSDP, assert_same_run
from tests.runs.tiny import TINY, begin, launched
from tra.model import Decoder
from tra.runs import train
from tra.runs.distributed import share_sequences

MODEL = replace(TINY.model, dropout=0.0, attention="tra-learned")
RECIPE = replace(TINY, model=MODEL, length=64, steps=8, evaluations=(), keep_checkpoints=3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(RECIPE, folder)
    return folder


def test_a_mesh_of_data_and_context_goes_on_from_one_process(tmp_path: Path, alone: Path) -> None:
    folder = tmp_path / "run"
    begin(replace(RECIPE, gradient_checkpointing=True), folder)
    shutil.copy(alone / "metrics.jsonl", folder)
    shutil.copytree(alone / "checkpoints/step-00000004", folder / "checkpoints/step-00000004")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    launched(torchrun, "-m", "tra", "train", "--resume", str(folder), "--context-parallel", "2")
    assert_same_run(folder, alone, 8)


def test_a_sharded_model_shares_sequences(tmp_path: Path, alone: Path) -> None:
    begin(replace(RECIPE, accumulate=2), tmp_path / "run")
    launched(FSDP, "-m", "tra", "train", "--resume", str(tmp_path / "run"), "--context-parallel", "2")
    assert_same_run(tmp_path / "run", alone, 8)


def test_a_number_that_does_not_divide_the_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="context_parallel must divide the number of processes, 1, got 2"):
        train(RECIPE, tmp_path / "run", context_parallel=2)
    assert not (tmp_path / "run").exists()


def test_a_mechanism_that_reads_all_keys_goes_on_from_one_process_and_in_one_process(tmp_path: Path) -> None:
    recipe = replace(RECIPE, model=replace(MODEL, attention="rope"), schedule="constant")
    train(recipe, tmp_path / "alone")
    folder = tmp_path / "run"
    begin(recipe, folder)
    shutil.copy(tmp_path / "alone/metrics.jsonl", folder)
    shutil.copytree(tmp_path / "alone/checkpoints/step-00000004", folder / "checkpoints/step-00000004")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launched(torchrun, "-m", "tra", "train", "--resume", str(folder), "--context-parallel", "2")
    assert_same_run(folder, tmp_path / "alone", 8)
    for path in (folder, tmp_path / "alone"):
        train(recipe.extended(12), path)
    assert_same_run(folder, tmp_path / "alone", 12)


@pytest.mark.parametrize("attention", ["selective", "rope+selective"])
def test_selective_attention_is_refused_with_the_reason(attention: str) -> None:
    model = Decoder(replace(MODEL, attention=attention))
    reason = r"context_parallel must be 1 for .*selective, got 2: SelectiveAttention .* other processes hold"
    with pytest.raises(ValueError, match=reason):
        share_sequences(model, torch.device("cpu"), 2, 2)

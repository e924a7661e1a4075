"""Training survives: kills, interrupts, full disks, damaged checkpoints, non-finite losses, several processes."""

import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.testing import assert_close

import tra.training
from tra.errors import RunError
from tra.model import Block, Decoder, DecoderConfig
from tra.recipes import Recipe
from tra.tasks import FlipFlop
from tra.tasks.base import seed_of
from tra.training import schedule, train, training_batches

QUIET = Console(quiet=True)

# Dropout is on, so that an exact resume has to get the random numbers right too.
TINY = Recipe(
    name="tiny",
    model=DecoderConfig(vocabulary=6, layers=2, heads=2, width=32, dropout=0.1),
    task="flip_flop",
    length=16,
    steps=40,
    batch=8,
    learning_rate=1e-3,
    log_every=1,
    checkpoint_every=4,
)


def started(folder: Path, *command: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tra", "train", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def begin(recipe: Recipe, folder: Path) -> None:
    """Lay out a run that has not started, so that a process can --resume it."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(recipe.to_json())


def weights(folder: Path, step: int) -> dict[str, bytes]:
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    return {file.name: file.read_bytes() for file in checkpoint.iterdir()}


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-????????"))


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY from beginning to end in one process, with one thread as the others."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    begin(TINY, folder)
    process = started(folder, "--resume", str(folder))
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return folder


def test_a_run_folder_holds_what_it_promises(uninterrupted: Path) -> None:
    assert Recipe.from_json((uninterrupted / "recipe.json").read_text()) == TINY
    metrics = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == list(range(1, 41))
    assert set(metrics[0]) == {"step", "loss", "gradient_norm", "learning_rate"}
    assert checkpoints(uninterrupted) == [36, 40]
    assert json.loads((uninterrupted / "results.json").read_text())["results"] == []
    speeds = [json.loads(line) for line in (uninterrupted / "speed.jsonl").read_text().splitlines()]
    assert all(entry["tokens_per_second"] > 0 for entry in speeds)


def test_killed_runs_end_with_the_same_bits(uninterrupted: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments, and right inside a checkpoint write, then on to the end."""
    folder = tmp_path / "run"
    begin(TINY, folder)
    rng = random.Random(0)
    killed_inside_a_write = 0
    for attempt in range(12):
        process = started(folder, "--resume", str(folder))
        before = max(checkpoints(folder), default=0)
        if attempt % 2 == 0:
            # While the folder of a new checkpoint exists under its partial name, it is being written.
            wait_for(lambda: list((folder / "checkpoints").glob("*.partial")), process)
        else:
            wait_for(lambda start=before: max(checkpoints(folder), default=0) > start, process)
            time.sleep(rng.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed_inside_a_write += bool(list((folder / "checkpoints").glob("*.partial")))
        if (killed_inside_a_write and attempt >= 3) or max(checkpoints(folder), default=0) >= 32:
            break
    assert killed_inside_a_write
    process = started(folder, "--resume", str(folder))
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert "going on from" in out
    assert weights(folder, 40) == weights(uninterrupted, 40)
    assert (folder / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    assert not list((folder / "checkpoints").glob("*.partial"))


def test_interrupt_saves_says_how_to_go_on_and_goes_on_exactly(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(replace(TINY, checkpoint_every=1000), folder)
    process = started(folder, "--resume", str(folder))
    wait_for(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 300, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    (step,) = checkpoints(folder)
    assert f"stopped after {step} of 40 steps and saved a checkpoint; go on with: tra train --resume {folder}" in err
    assert "Traceback" not in err
    resumed = started(folder, "--resume", str(folder))
    out, err = resumed.communicate()
    assert resumed.returncode == 0, out + err
    assert weights(folder, 40)["model.safetensors"] == weights(uninterrupted, 40)["model.safetensors"]
    assert (folder / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("damage", ["truncate", "flip", "state", "missing"])
def test_damaged_checkpoint_is_reported_and_the_one_before_used(
    uninterrupted: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    recipe = replace(TINY, steps=8)
    whole = {name: tensor.clone() for name, tensor in train(recipe, folder, console=QUIET).state_dict().items()}
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
        model = train(recipe, folder, console=QUIET)
    assert checkpoints(folder) == [4, 8]
    assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "place, message",
    [
        ("checkpoint", "could not write the checkpoint of step 8"),
        ("metrics", "could not write step 5 to"),
        ("start", "metrics.jsonl"),
    ],
)
def test_full_disk_is_reported_and_the_old_checkpoint_stays(tmp_path: Path, place: str, message: str) -> None:
    folder = tmp_path / "run"
    train(replace(TINY, steps=4), folder, console=QUIET)
    intact = weights(folder, 4)
    (folder / "recipe.json").write_text(replace(TINY, steps=12).to_json())
    metrics = (folder / "metrics.jsonl").stat().st_size
    limit = {"checkpoint": 20_000, "metrics": metrics + 50, "start": metrics - 50}[place]

    def no_space() -> None:
        # A write beyond the limit fails as it does on a full disk, instead of killing the process.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = started(folder, "--resume", str(folder), preexec_fn=no_space)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in err
    assert message in err
    if place != "start":
        assert f"the last good checkpoint is {folder}/checkpoints/step-00000004" in err
    assert weights(folder, 4) == intact
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004"]


def test_non_finite_loss_stops_and_names_step_and_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = tmp_path / "run", []

    def poisoned(model: torch.nn.Module, batch: object) -> torch.Tensor:
        calls.append(1)
        loss = original(model, batch)
        return loss * math.nan if len(calls) == 7 else loss

    original = tra.training.summed_loss
    monkeypatch.setattr(tra.training, "summed_loss", poisoned)
    with pytest.raises(RunError, match=r"the loss is nan at step 7; the last good checkpoint is .*step-00000004"):
        train(TINY, folder, console=QUIET)
    assert checkpoints(folder) == [4]


def test_non_finite_gradient_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss may be finite and its gradient not."""
    original, calls = tra.training.summed_loss, []

    def poisoned(model: torch.nn.Module, batch: object) -> torch.Tensor:
        calls.append(1)
        loss = original(model, batch)
        if len(calls) == 8:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(tra.training, "summed_loss", poisoned)
    with pytest.raises(RunError, match=r"the gradient norm is (nan|inf) at step 8; the last good .*step-00000004"):
        train(TINY, tmp_path / "run", console=QUIET)
    assert checkpoints(tmp_path / "run") == [4]


def test_checkpoints_after_damage_are_kept_and_strangers_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(replace(TINY, steps=12), folder, console=QUIET)
    shutil.copytree(folder / "checkpoints" / "step-00000008", folder / "checkpoints" / "step-best")
    for step in (8, 12):
        (folder / "checkpoints" / f"step-{step:08d}" / "state.json").unlink()
    (folder / "recipe.json").write_text(replace(TINY, steps=4).to_json())
    with pytest.warns(UserWarning, match="is damaged"):
        train(replace(TINY, steps=4), folder, console=QUIET)
    assert checkpoints(folder) == [4]
    assert (folder / "checkpoints" / "step-best").exists()


def test_wrong_recipe_leaves_the_folder_free(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for wrong in ({"model": replace(TINY.model, heads=5)}, {"data": str(tmp_path / "nowhere")}):
        with pytest.raises(ValueError, match="must be"):
            train(replace(TINY, steps=2, **wrong), folder, console=QUIET)
        assert not (folder / "recipe.json").exists()
    train(replace(TINY, steps=2), folder, console=QUIET)


def test_recipe_stored_before_a_field_existed_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = replace(TINY, steps=2)
    train(recipe, folder, console=QUIET)
    stored = json.loads((folder / "recipe.json").read_text())
    del stored["keep_checkpoints"]
    (folder / "recipe.json").write_text(json.dumps(stored))
    train(recipe, folder, console=QUIET)
    assert checkpoints(folder) == [2]


def launched(launcher: list[str], *command: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", *launcher, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def assert_same_run(folder: Path, other: Path, steps: int) -> None:
    """Up to rounding."""
    weights = [load_file(path / f"checkpoints/step-{steps:08d}/model.safetensors") for path in (folder, other)]
    assert_close(*weights, rtol=1e-4, atol=1e-6)
    metrics = [(path / "metrics.jsonl").read_text().splitlines() for path in (folder, other)]
    assert len(metrics[0]) == steps
    for left, right in zip(*metrics, strict=True):
        # AdamW and clipping hide a wrong factor on the gradient from the weights, but not from its norm.
        assert json.loads(left) == pytest.approx(json.loads(right), rel=1e-4)


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FSDP = ["accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2", "--num_processes=2"]
FSDP += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]  # or it warns that these are defaults


@pytest.mark.parametrize(
    "launcher, one, two",
    [
        (TORCHRUN, {}, {}),
        (TORCHRUN, {}, {"accumulate": 2, "gradient_checkpointing": True}),
        # In pieces, so that low precision rounds the same sums.
        (FSDP, {"precision": "bf16", "accumulate": 2}, {"precision": "bf16"}),
    ],
    ids=["replicas", "replicas that save memory", "shards in low precision"],
)
def test_two_processes_give_the_weights_of_one(
    tmp_path: Path, launcher: list[str], one: dict[str, Any], two: dict[str, Any]
) -> None:
    recipe = replace(TINY, model=replace(TINY.model, dropout=0.0), steps=12)
    train(replace(recipe, **one), tmp_path / "one", console=QUIET)
    begin(replace(recipe, **two), tmp_path / "two")
    launched(launcher, "-m", "tra", "train", "--resume", str(tmp_path / "two"))
    assert_same_run(tmp_path / "two", tmp_path / "one", 12)


def test_shards_go_on_from_one_process_and_one_process_from_shards(tmp_path: Path) -> None:
    recipe = replace(TINY, model=replace(TINY.model, dropout=0.0), steps=12, keep_checkpoints=3)
    train(recipe, tmp_path / "one", console=QUIET)
    recipe = replace(recipe, accumulate=2, gradient_checkpointing=True)
    folder, script = tmp_path / "run", str(Path(__file__).with_name("sharded_run.py"))
    begin(recipe, folder)
    shutil.copy(tmp_path / "one" / "metrics.jsonl", folder)
    shutil.copytree(tmp_path / "one/checkpoints/step-00000004", folder / "checkpoints/step-00000004")
    launched(FSDP, script, str(folder), "7")
    assert checkpoints(folder) == [4, 7]
    shutil.copytree(folder, tmp_path / "again one")
    train(recipe, tmp_path / "again one", console=QUIET)
    launched(FSDP, script, str(folder), "12")
    for path in (folder, tmp_path / "again one"):
        assert_same_run(path, tmp_path / "one", 12)


def test_gradient_checkpointing_computes_every_block_twice_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Block.forward, []

    def counted(self: Block, *arguments: object) -> torch.Tensor:
        calls.append(self)
        return forward(self, *arguments)

    monkeypatch.setattr(Block, "forward", counted)
    counts = []
    for saves_memory in (False, True):
        folder = tmp_path / str(saves_memory)
        train(replace(TINY, steps=4, gradient_checkpointing=saves_memory), folder, console=QUIET)
        counts.append(len(calls))
    assert counts == [4 * 2, 4 * 2 + 2 * (4 * 2)]
    assert weights(tmp_path / "True", 4) == weights(tmp_path / "False", 4)


def test_accumulation_changes_nothing_but_rounding(tmp_path: Path) -> None:
    recipe = replace(TINY, model=replace(TINY.model, dropout=0.0), steps=6)
    whole = train(recipe, tmp_path / "whole", console=QUIET).state_dict()
    pieces = train(replace(recipe, accumulate=4), tmp_path / "pieces", console=QUIET).state_dict()
    for name, tensor in whole.items():
        assert_close(pieces[name], tensor, rtol=1e-4, atol=1e-6)


def test_one_pass_over_a_fixed_set_uses_every_sequence_once() -> None:
    recipe = replace(TINY, data="fixed", examples=40, steps=10, length=64)
    batch_of_step = training_batches(recipe)
    first = torch.cat([batch_of_step(step).tokens for step in range(5)])
    second = torch.cat([batch_of_step(step).tokens for step in range(5, 10)])
    assert len(first.unique(dim=0)) == 40
    assert torch.equal(first.unique(dim=0), second.unique(dim=0))
    assert not torch.equal(first, second)
    again = training_batches(recipe)
    assert torch.equal(again(7).tokens, batch_of_step(7).tokens)


def test_trains_on_the_published_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rng = torch.Generator().manual_seed(0)
    texts = [FlipFlop().text(row) for row in FlipFlop().sample(rng, 24, 16).tokens]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "train-0.parquet")
    recipe = replace(TINY, data=str(tmp_path), steps=3)
    train(recipe, tmp_path / "run", console=QUIET)
    assert checkpoints(tmp_path / "run") == [3]
    with pytest.raises(ValueError, match="length must be that of the data, 16, got 32"):
        training_batches(replace(recipe, length=32))
    with pytest.raises(ValueError, match="batch must be at most the 24 sequences of the data, got 32"):
        training_batches(replace(recipe, batch=32))


def test_fresh_samples_differ_between_steps_and_seeds() -> None:
    batch_of_step = training_batches(TINY)
    assert not torch.equal(batch_of_step(0).tokens, batch_of_step(1).tokens)
    assert not torch.equal(batch_of_step(0).tokens, training_batches(replace(TINY, seed=1))(0).tokens)


def test_schedule_rises_over_the_warm_up_and_falls_as_a_cosine() -> None:
    factors = [schedule(step, 1000, 0.05) for step in range(1000)]
    assert factors[0] == pytest.approx(1 / 51)
    assert factors[50] == 1.0 == max(factors)
    assert all(a < b for a, b in itertools.pairwise(factors[:51]))
    assert all(a > b for a, b in itertools.pairwise(factors[50:]))
    assert factors[525] == pytest.approx(0.5, abs=1e-9)
    assert factors[-1] < 1e-5
    assert schedule(0, 1000, 0.0) == 1.0


def test_folder_of_another_recipe_or_process_is_refused(tmp_path: Path) -> None:
    recipe = replace(TINY, steps=2)
    train(recipe, tmp_path / "run", console=QUIET)
    with pytest.raises(ValueError, match="holds a run of another recipe: batch, seed differ"):
        train(replace(recipe, batch=4, seed=9), tmp_path / "run", console=QUIET)
    from filelock import FileLock

    with (
        FileLock(tmp_path / "run" / ".lock"),
        pytest.raises(RunError, match="another process is training in"),
    ):
        train(recipe, tmp_path / "run", console=QUIET)


def test_batch_that_cannot_be_divided_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch must be a multiple of processes x accumulate = 1 x 3, got 8"):
        train(replace(TINY, accumulate=3), tmp_path, console=QUIET)


def test_writes_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(replace(TINY, steps=3), tmp_path / "run", console=QUIET, tensorboard=True)
    (events,) = (tmp_path / "run").rglob("events.out.tfevents*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == [1, 2, 3]


def test_mixed_precision_lowers_the_products_and_keeps_the_model_whole(tmp_path: Path) -> None:
    recipe = replace(TINY, learning_rate=3e-3, checkpoint_every=40)
    model = train(replace(recipe, precision="bf16"), tmp_path / "bf16", console=QUIET)
    full = train(recipe, tmp_path / "full", console=QUIET)
    assert not torch.equal(model.head.weight, full.head.weight)
    assert_close(model.head.weight, full.head.weight, rtol=0.1, atol=0.01)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "bf16" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.5 * losses[0]
    saved = load_file(tmp_path / "bf16/checkpoints/step-00000040/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.float32


def test_update_is_adamw_with_clipping_warm_up_and_decay(tmp_path: Path) -> None:
    """Against the loop written out."""
    recipe = replace(
        TINY, model=replace(TINY.model, dropout=0.0), steps=5, warmup=0.4, clip=0.5, weight_decay=0.3, beta2=0.9
    )
    trained = train(recipe, tmp_path / "run", console=QUIET).state_dict()
    torch.manual_seed(seed_of("weights", recipe.seed))
    model = Decoder(recipe.model)
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    rates = [1e-3 / 3, 2e-3 / 3] + [0.5e-3 * (1 + math.cos(math.pi * step / 3)) for step in range(3)]
    for step, rate in enumerate(rates):
        batch = training_batches(recipe)(step)
        logits, wanted = model(batch.tokens[:, :-1]), batch.counted[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[wanted], batch.tokens[:, 1:][wanted])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert norm > 0.5
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            first, second = moments[name]
            clipped = gradient * (0.5 / norm)
            first.mul_(0.9).add_(0.1 * clipped)
            second.mul_(0.9).add_(0.1 * clipped**2)
            corrected = first / (1 - 0.9 ** (step + 1))
            size = (second / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8
            with torch.no_grad():
                parameter.mul_(1 - rate * 0.3).sub_(rate * corrected / size)
    for name, parameter in model.state_dict().items():
        assert_close(trained[name], parameter, rtol=1e-4, atol=1e-5)


def test_progress_shows_loss_speed_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tra.progress.SECONDS_BETWEEN_LINES", 0.0)
    console = Console(file=io.StringIO(), width=200)
    train(replace(TINY, steps=3), tmp_path / "run", console=console)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"tiny \(tra\): step 2/3, loss [\d.]+, [\d.]+ steps/s, \d+ s left", lines[1])
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    train(replace(TINY, steps=3), tmp_path / "live", console=terminal)
    assert re.search(r"3/3.* loss [\d.]+, .*steps/s", terminal.file.getvalue())

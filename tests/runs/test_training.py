"""Training: each update against the loop written out, what must change no bit, and what stops a run."""

import io
import itertools
import json
import math
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.testing import assert_close

import tra.runs.step
from tests.runs.tiny import TINY, checkpoints, weights
from tra.errors import RunError
from tra.model import Block, Decoder
from tra.progress import hidden, shown
from tra.recipes import Evaluation
from tra.runs import train
from tra.runs.batches import training_batches
from tra.runs.schedule import schedule_factor
from tra.tasks.base import seed_of


def test_update_is_adamw_with_clipping_warm_up_and_decay(tmp_path: Path) -> None:
    """Against the loop written out."""
    recipe = replace(
        TINY, model=replace(TINY.model, dropout=0.0), steps=5, warmup=0.4, clip=0.5, weight_decay=0.3, beta2=0.9
    )
    trained = train(recipe, tmp_path / "run").model.state_dict()
    torch.manual_seed(seed_of("weights", recipe.seed))
    model = Decoder(recipe.model)
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    rates = [1e-3 / 3, 2e-3 / 3] + [0.5e-3 * (1 + math.cos(math.pi * step / 3)) for step in range(3)]
    for step, rate in enumerate(rates):
        batch = training_batches(recipe, recipe.build_task())(step)
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


def test_accumulation_changes_nothing_but_rounding(tmp_path: Path) -> None:
    recipe = replace(TINY, model=replace(TINY.model, dropout=0.0), steps=6)
    whole = train(recipe, tmp_path / "whole").model.state_dict()
    pieces = train(replace(recipe, accumulate=4), tmp_path / "pieces").model.state_dict()
    for name, tensor in whole.items():
        assert_close(pieces[name], tensor, rtol=1e-4, atol=1e-6)


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
        train(replace(TINY, steps=4, gradient_checkpointing=saves_memory), folder)
        counts.append(len(calls))
    assert counts == [4 * 2, 4 * 2 + 2 * (4 * 2)]
    assert weights(tmp_path / "True", 4) == weights(tmp_path / "False", 4)


def test_mixed_precision_lowers_the_products_and_keeps_the_model_whole(tmp_path: Path) -> None:
    recipe = replace(TINY, learning_rate=3e-3, checkpoint_every=40)
    model = train(replace(recipe, precision="bf16"), tmp_path / "bf16").model
    full = train(recipe, tmp_path / "full").model
    assert not torch.equal(model.head.weight, full.head.weight)
    assert_close(model.head.weight, full.head.weight, rtol=0.1, atol=0.01)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "bf16" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.5 * losses[0]
    saved = load_file(tmp_path / "bf16/checkpoints/step-00000040/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.float32


def test_schedule_rises_over_the_warm_up_and_falls_as_a_cosine() -> None:
    recipe = replace(TINY, steps=1000, warmup=0.05)
    factors = [schedule_factor(recipe, step) for step in range(1000)]
    assert factors[0] == pytest.approx(1 / 51)
    assert factors[50] == 1.0 == max(factors)
    assert all(a < b for a, b in itertools.pairwise(factors[:51]))
    assert all(a > b for a, b in itertools.pairwise(factors[50:]))
    assert factors[525] == pytest.approx(0.5, abs=1e-9)
    assert factors[-1] < 1e-5
    assert schedule_factor(replace(recipe, warmup=0.0), 0) == 1.0


def test_the_other_schedules_stay_and_fall_to_zero_in_a_line() -> None:
    recipe = replace(TINY, steps=100, warmup_steps=9, schedule="constant")
    rising = [(step + 1) / 10 for step in range(9)]
    assert [schedule_factor(recipe, step) for step in range(100)] == rising + [1.0] * 91
    recipe = replace(recipe, schedule="wsd", decay=0.2)
    falling = [left / 21 for left in range(20, 0, -1)]
    assert [schedule_factor(recipe, step) for step in range(100)] == rising + [1.0] * 71 + falling


def test_non_finite_loss_stops_and_names_step_and_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = tmp_path / "run", []

    def poisoned(*given: object) -> torch.Tensor:
        calls.append(1)
        loss = original(*given)
        return loss * math.nan if len(calls) == 7 else loss

    original = tra.runs.step.summed_loss
    monkeypatch.setattr(tra.runs.step, "summed_loss", poisoned)
    with pytest.raises(RunError, match=r"the loss is nan at step 7; the last good checkpoint is .*step-00000004"):
        train(TINY, folder)
    assert checkpoints(folder) == [4]


def test_non_finite_gradient_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss may be finite and its gradient not."""
    original, calls = tra.runs.step.summed_loss, []

    def poisoned(*given: object) -> torch.Tensor:
        calls.append(1)
        loss = original(*given)
        if len(calls) == 8:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(tra.runs.step, "summed_loss", poisoned)
    with pytest.raises(RunError, match=r"the gradient norm is (nan|inf) at step 8; the last good .*step-00000004"):
        train(TINY, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [4]


def test_progress_shows_loss_speed_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tra.progress.SECONDS_BETWEEN_LINES", 0.0)
    console = Console(file=io.StringIO(), width=200)
    with shown(console):
        train(replace(TINY, steps=3), tmp_path / "run")
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"tiny \(tra\): step 2/3, loss [\d.]+, [\d.]+ steps/s, \d+ s left", lines[1])
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    with shown(terminal):
        train(replace(TINY, steps=3), tmp_path / "live")
    assert re.search(r"3/3.* loss [\d.]+, .*steps/s", terminal.file.getvalue())


def test_training_is_silent_unless_somebody_looks_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = replace(TINY, steps=2, evaluations=(Evaluation("iid", 16, 3),))
    train(recipe, tmp_path / "silent")
    assert capfd.readouterr() == ("", "")
    with shown():
        train(recipe, tmp_path / "shown")
    out, err = capfd.readouterr()
    assert err == ""
    assert "tiny (tra): step 2/2, loss" in out
    assert "   tra at     16 tokens, exact match:  iid " in out
    with shown(), hidden():
        train(recipe, tmp_path / "hidden")
    assert capfd.readouterr() == ("", "")


def test_signals_mean_what_they_did_once_training_ends(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(replace(TINY, steps=1), tmp_path / "run")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_training_in_another_thread_gives_the_same_bits(tmp_path: Path) -> None:
    """Where signals cannot be watched."""
    recipe = replace(TINY, steps=2)
    thread = threading.Thread(target=train, args=(recipe, tmp_path / "thread"))
    thread.start()
    thread.join()
    train(recipe, tmp_path / "here")
    assert weights(tmp_path / "thread", 2) == weights(tmp_path / "here", 2)

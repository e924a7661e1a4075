"""Measuring a model on the named, fixed sets of a task."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tra.distributed import ContextParallel, context_parallel
from tra.lookup import lookup
from tra.model import Decoder, split_tokens
from tra.progress import progress, say
from tra.runs.distributed import share_sequences
from tra.runs.folder import Run, load_run
from tra.runs.memory import check_evaluation
from tra.tasks import Batch, Evaluation, Prediction, Result, Task

TOKENS_PER_BATCH = 16_384
LOGITS_PER_BATCH = 1 << 27
TOKENS_PER_PIECE = 512
"""Long sequences are read piece by piece through the cache, so that memory stays linear in the length."""
SCORES_PER_PIECE = 1 << 20
"""Of one head, over the batch. Full batches of such sequences have pieces of 64 tokens: mechanisms that hold all scores
run several times faster while those of a piece fit the processor's cache."""


def evaluate(
    run: Run | Path | str,
    *,
    sets: Sequence[str] = (),
    lengths: Sequence[int] = (),
    examples: int | None = None,
    stride: int | None = None,
    data: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    context_parallel: int = 1,
) -> list[Result]:
    """Measure a trained run on its recipe's sets, or on others. Nothing is stored.

    Where a process group exists, every process calls this and does its part; all get the results.

    Args:
        run: a run, or what :func:`load_run` takes.
        sets: names of evaluation sets; those of the recipe by default.
        lengths: in the task's unit; those of the recipe by default.
        examples: sequences of each; as many as the recipe says by default, else as many as the task usually has.
        stride: of a text: let windows overlap and move on by this many tokens.
        data: in place of the task's own sets, the copy that its authors published: "hub", or a folder that holds it.
        options: of the mechanism, others than it was trained with: RoPE's scaling to longer sequences, say.
        context_parallel: how many processes share each sequence, each with a part of its tokens; it divides their
            number.
    """
    run = run if isinstance(run, Run) else load_run(run)
    sets = (sets,) if isinstance(sets, str) else sets
    lengths = (lengths,) if isinstance(lengths, int) else lengths
    recipe, task, model = run.recipe, run.task, run.model if not options else with_options(run.model, options)
    shards = share_sequences(model, model.head.weight.device, context_parallel, _processes()[0])
    if data is not None:
        names = sets or tuple(dict.fromkeys(entry.name for entry in recipe.evaluations))
        return measure_published(model, task, names, None if data == "hub" else Path(data), shards)
    return measure_all(model, task, chosen(run, sets, lengths, examples, stride), model.config.label, shards)


def with_options(model: Decoder, options: Mapping[str, Any]) -> Decoder:
    """The same weights under other options of the mechanism."""
    changed = replace(model.config, attention_options={**model.config.attention_options, **options})
    other = Decoder(changed).to(model.head.weight.device)
    other.load_state_dict(model.state_dict())
    return other.train(model.training)


def chosen(
    run: Run, sets: Sequence[str], lengths: Sequence[int], examples: int | None, stride: int | None
) -> list[Evaluation]:
    """The recipe's evaluations, or those that are asked for in their place."""
    usual = run.recipe.evaluations
    if not (sets or lengths or examples is not None or stride is not None) and usual:
        return list(usual)
    names = tuple(sets) or tuple(dict.fromkeys(entry.name for entry in usual))
    lengths = tuple(lengths) or tuple(dict.fromkeys(entry.length for entry in usual if entry.length >= (stride or 1)))
    if not names or not lengths:
        raise ValueError(f"sets and lengths must be given: the recipe of {run.folder} names none")
    return [
        Evaluation(name, length, run.task.usual_examples(usual, name, length) if examples is None else examples, stride)
        for length in lengths
        for name in names
    ]


def measure_all(
    model: Decoder,
    task: Task,
    evaluations: Sequence[Evaluation],
    label: str,
    shards: ContextParallel | None = None,
) -> list[Result]:
    """Measure a model on several sets, with a line for each length as it is done."""
    for evaluation in evaluations:
        lookup(task.evaluation_sets(), evaluation.name, "evaluation set")
        check_evaluation(model.config, evaluation)
        next(task.evaluation_batches(evaluation, 1))  # what must be made for it has a progress of its own
    results: list[Result] = []
    told = 0
    with progress(f"measuring {label}", len(evaluations), "set") as update:
        for done, evaluation in enumerate(evaluations, 1):
            results.append(measure(model, task, evaluation, shards))
            update(done, **{task.measure.measure: results[-1].value})
            if done == len(evaluations) or evaluations[done].length != evaluation.length:
                values = "  ".join(f"{result.set_label} {result.value:.3f}" for result in results[told:])
                told = done
                title = task.measure.titles[task.measure.measure]
                say(f"{label:>6} at {evaluation.length:>6,} {task.unit}, {title}:  {values}")
    return results


def measure(model: Decoder, task: Task, evaluation: Evaluation, shards: ContextParallel | None = None) -> Result:
    """Measure a model on one named set."""
    tokens = min(TOKENS_PER_BATCH, LOGITS_PER_BATCH // model.config.vocabulary)
    batches = task.evaluation_batches(evaluation, max(1, tokens // max(1, evaluation.length)))
    return task.score(evaluation, predict(model, batches, shards))


def measure_published(
    model: Decoder,
    task: Task,
    names: Sequence[str],
    folder: Path | None,
    shards: ContextParallel | None = None,
) -> list[Result]:
    """Measure a model on splits of the copy that the task's authors published."""
    results = []
    for name in names:
        whole = task.published(name, folder)
        length = whole.tokens.shape[1]
        size = max(1, TOKENS_PER_BATCH // length)
        batches = (whole[start : start + size] for start in range(0, len(whole), size))
        results.append(task.score(Evaluation(name, length, len(whole)), predict(model, batches, shards)))
    return results


@torch.inference_mode()
def predict(model: Decoder, batches: Iterable[Batch], shards: ContextParallel | None = None) -> Iterator[Prediction]:
    """What a model, in evaluation mode, makes of each batch.

    Processes that torchrun started take turns at the batches, and each gets what all of them found, in order: as many
    batches of the same size as one process has, so the same bits. With shards, it is groups of processes that take
    turns, and those of a group share a batch's sequences.
    """
    device = model.head.weight.device
    processes, rank = _processes()
    sharing = 1 if shards is None else shards.size
    was_training = model.training
    model.eval()
    remaining = iter(batches)
    try:
        while turn := list(islice(remaining, processes // sharing)):
            shortest = min(batch.tokens.shape[1] - 1 for batch in turn)
            if shortest < sharing:
                raise ValueError(f"context_parallel must be at most the {shortest} tokens of a sequence, got {sharing}")
            own = rank // sharing
            mine = None
            if own < len(turn):
                batch = turn[own].to(device)
                mine = [_predict(model, batch)] if shards is None else _predict_shard(model, batch, shards)
            yield from _of_all(mine, processes, sharing)
    finally:
        model.train(was_training)


def _processes() -> tuple[int, int]:
    """How many there are, and which this is."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def _of_all(mine: list[Prediction] | None, processes: int, sharing: int) -> Iterator[Prediction]:
    found = [mine]
    if processes > 1:
        found = [None] * processes
        dist.all_gather_object(found, mine)
    whole = [rounds for rounds in found if rounds is not None]
    for start in range(0, len(whole), sharing):
        parts = [part for parts in zip(*whole[start : start + sharing], strict=True) for part in parts]
        yield parts[0] if sharing == 1 else Prediction(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))


def _predict(model: Decoder, batch: Batch) -> Prediction:
    inputs, targets, counted = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.counted[:, 1:]
    cache = model.new_cache() if inputs.shape[1] > TOKENS_PER_PIECE else None
    pieces = zip(*(split_tokens(x, _size_of_piece(inputs)) for x in (inputs, targets)), strict=True)
    return _joined((_judged(model(piece, cache=cache), target) for piece, target in pieces), counted)


def _size_of_piece(inputs: Tensor) -> int:
    if inputs.shape[1] <= TOKENS_PER_PIECE:
        return TOKENS_PER_PIECE
    return min(TOKENS_PER_PIECE, max(64, SCORES_PER_PIECE // inputs.numel()))


def _predict_shard(model: Decoder, batch: Batch, shards: ContextParallel) -> list[Prediction]:
    """This process's part of what the processes that share a batch find, in each round of reading."""
    whole = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.counted[:, 1:]
    rounds = list(zip(*(model.split_rounds(shards, _size_of_piece(whole[0]), x) for x in whole), strict=True))
    cache = model.new_cache() if len(rounds) > 1 else None  # otherwise keys stay where they are
    found = []
    for each in rounds:
        inputs, targets, counted = (shards.shard(x) for x in each)
        with context_parallel(shards):
            hidden = model.hidden(inputs, cache=cache)
        pieces = zip(hidden.split(TOKENS_PER_PIECE, dim=1), targets.split(TOKENS_PER_PIECE, dim=1), strict=True)
        found.append(_joined((_judged(model.head(piece), target) for piece, target in pieces), counted))
    return found


def _joined(pieces: Iterable[tuple[Tensor, Tensor]], counted: Tensor) -> Prediction:
    """The predictions of a batch, on the CPU for sums in float64, which some devices have not."""
    right, loss = (torch.cat(each, dim=1) for each in zip(*pieces, strict=True))
    return Prediction(right.cpu(), loss.masked_fill(~counted, 0.0).cpu(), counted.cpu())


def _judged(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Which predictions are right, and the loss of each."""
    logits = logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return logits.argmax(dim=-1) == target, loss.view_as(target)

"""Whether the kernels may be believed on this device: each proves itself on a small fixed problem before its first use.

A kernel's error against the reference in double precision may be at most twice that of plain PyTorch in the same dtype:
the largest error and the root mean square, of the output and of every gradient.
Queries and keys are small integers, so that every score is exact and nobody can disagree on which keys are kept.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tra.ops.threshold_relative import reference
from tra.ops.threshold_relative.call import Inputs, Options
from tra.version import __version__

KINDS = ("forward", "decode", "backward", "straight_through")
"""Of one call."""
ALL_KINDS = (*KINDS, "packed", "pieces")
"""With rows that are packed in rounds, and keys that come one piece after the other: forward and backward of each."""
TRAINING = ("backward", "straight_through", "packed", "pieces")
REPORT = "please report it with the output of `tra doctor`"
LENGTH, CACHED, WIDTH = 150, 2300, 64
"""Of the sequence that forward and backward compute, and of the cache that decoding reads: beyond its second round."""
PACKED_LENGTH = 400
"""Of the sequence whose rows are packed: some end in the first of its two rounds, and some go on."""
CUT = 64
"""Keys of a piece but for the nearest, a multiple of every block's."""
ROOM = 700
"""Behind it, in a cache of fixed size."""
FLOOR = 1e-5
"""Error relative to the largest number that is always allowed: sums in another order, and exponentials of a GPU, which
rounds their arguments of up to 40 to float32 once more."""


class Verdict(NamedTuple):
    kind: str
    dtype: str
    error: float
    """Against double precision, relative to the largest number: the worst of output and gradients."""
    plain_error: float
    """That of plain PyTorch."""
    failure: str | None
    """What disagreed, or what was raised; None if nothing did."""
    ran: bool = True


_verdicts: dict[tuple[str, torch.dtype, str], Verdict] = {}
"""Of this process, by device, dtype and kind."""


def distrust(device: torch.device, dtype: torch.dtype, kinds: tuple[str, ...]) -> str | None:
    """Why the kernels of these kinds are not to be used, as the rest of a sentence; None if they may be.

    Nothing is computed while a graph is captured: what was found before counts then.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    for kind in kinds:
        place = (str(device), dtype, kind)
        if place not in _verdicts:
            if capturing:
                continue
            _verdicts[place] = _stored(device, dtype, kind) or store(device, examine(device, dtype, kind))
        verdict = _verdicts[place]
        if verdict.failure is not None:
            return f"fails its check on {device} ({kind} in {verdict.dtype}: {verdict.failure}); {REPORT}"
    return None


def examine(device: torch.device, dtype: torch.dtype, kind: str) -> Verdict:
    """Let a kernel compute its problem and compare."""
    if kind == "pieces":
        return compare_with_reference(kind, dtype, partial(_in_pieces, device))
    return compare_with_reference(kind, dtype, partial(_kernels, device, packed_from=0 if kind == "packed" else None))


Compute = Callable[[Inputs, Options, Tensor, bool], dict[str, Tensor]]
"""From a problem, with whether gradients are wanted: the output, and the gradients by their names."""


def compare_with_reference(kind: str, dtype: torch.dtype, compute: Compute) -> Verdict:
    """What a computation of the problem of that kind is worth."""
    name = str(dtype).removeprefix("torch.")
    nowhere = float("nan")
    # A caller's modes are not the problem's.
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        with _one_thread():
            inputs, options, grad = problem(kind, dtype)
            exact = _reference(_in_double(inputs), options, grad.double())
            plain = {what: _distance(x, exact[what]) for what, x in _plain(inputs, options, grad).items()}
        try:
            ours = compute(inputs, options, grad, kind in TRAINING)
        except Exception as raised:  # whatever it is, the kernel cannot be used
            return Verdict(kind, name, nowhere, nowhere, f"{type(raised).__name__}: {raised}", ran=False)
    worst, allowed_error, failure = 0.0, 0.0, None
    for what, found in ours.items():
        same = what.removesuffix("_with_lengths")
        with _one_thread():
            mean, largest = _distance(found, exact[same])
        plain_mean, plain_largest = plain[same]
        right = mean <= 2.0 * plain_mean + FLOOR and largest <= 2.0 * plain_largest + FLOOR
        if not right and failure is None:
            failure = f"{what} is off by {largest:.1e}, plain PyTorch by {plain_largest:.1e}"
        if not largest <= worst:
            worst, allowed_error = largest, plain_largest
    return Verdict(kind, name, worst, allowed_error, failure)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For problems so small that threads cost more than they save, and minutes on a machine that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def problem(kind: str, dtype: torch.dtype) -> tuple[Inputs, Options, Tensor]:
    """On the CPU. Rows of which some stop early and some keep nothing, padding, and two query heads for a key head."""
    numbers = torch.Generator().manual_seed(20)
    keys = {"decode": CACHED, "packed": PACKED_LENGTH}.get(kind, LENGTH)
    queries = 2 if kind == "decode" else keys

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=numbers).to(dtype)

    query, key = integers(1, 4, queries, WIDTH), integers(1, 2, keys, WIDTH)
    query[:, :, ::7] = 0.0
    query[:, :, -1, 0] = 1.0
    value = (torch.randn(1, 2, keys, WIDTH, generator=numbers) + 1.0).to(dtype)
    gate = -torch.rand(1, 4, queries, generator=numbers) * (0.02 if kind == "decode" else 1.0)
    mask = torch.rand(1, keys, generator=numbers) < 0.9
    grad = torch.randn(1, 4, queries, WIDTH, generator=numbers).to(dtype)
    options = Options(1 / 8, 0.0, 0.0, 0.0, 1e-6, None)
    if kind in ("straight_through", "pieces"):
        options = options._replace(straight_through=0.5)
    if kind == "pieces":
        options = options._replace(score_bound=WIDTH / 8)
    return Inputs(query, key, value, gate, mask, *[None] * 5), options, grad


def _kernels(
    device: torch.device, inputs: Inputs, options: Options, grad: Tensor, trains: bool, packed_from: int | None = None
) -> dict[str, Tensor]:
    from tra.ops.threshold_relative.triton import launch

    moved: Any = (None if x is None else x.to(device) for x in inputs)
    there = Inputs(*moved)
    result = launch.forward(there, options, trains, packed_from)
    found = {"out": result.out}
    if launch.decodes(there):
        found["out_with_lengths"] = launch.forward(_with_room(there), options, trains).out
    if trains:
        gradients = launch.backward(grad.to(device), there, result, options, packed_from=packed_from)
        found |= {f"grad_{name}": x for name, x in gradients._asdict().items() if x is not None}
    return {name: x.cpu() for name, x in found.items()}


def _in_pieces(device: torch.device, inputs: Inputs, options: Options, grad: Tensor, trains: bool) -> dict[str, Tensor]:
    from tra.ops.threshold_relative.pieces import Piece, Rows
    from tra.ops.threshold_relative.triton.pieces import BackwardRows, ForwardRows

    moved: Any = (None if x is None else x.to(device) for x in inputs)
    there = Inputs(*moved)
    key, value, mask = there.key, there.value, there.key_mask
    assert mask is not None
    rows = Rows(there, options, 0, LENGTH)
    edges = (0, CUT, 2 * CUT, LENGTH)
    pieces = [
        Piece(key[:, :, low:high], value[:, :, low:high], low, mask[:, low:high], mask[:, :low].sum(1))
        for low, high in pairwise(edges)
    ]
    forward = ForwardRows(rows, trains)
    for piece in reversed(pieces):
        forward.visit(piece)
    result = forward.result()
    backward = BackwardRows(rows, result, grad.to(device))
    found = [backward.visit(piece) for piece in reversed(pieces)]
    grad_key, grad_value = (torch.cat(parts[::-1], 2) for parts in zip(*found, strict=True))
    named = {"query": backward.grad_query, "key": grad_key, "value": grad_value, "log_gate": backward.grad_gate}
    return {"out": result.out.cpu(), **{f"grad_{name}": x.cpu() for name, x in named.items()}}


def _with_room(inputs: Inputs) -> Inputs:
    """The same call with a cache of fixed size, in which keys that were never written follow those that there are."""
    keys, room = inputs.key.shape[2], (0, 0, 0, ROOM)
    key, value = (pad(x, room, value=torch.nan) for x in (inputs.key, inputs.value))
    mask = None if inputs.key_mask is None else pad(inputs.key_mask, (0, ROOM), value=True)
    lengths = torch.full((key.shape[0],), keys, device=key.device)
    return inputs._replace(key=key, value=value, key_mask=mask, key_lengths=lengths)


def _reference(inputs: Inputs, options: Options, grad: Tensor) -> dict[str, Tensor]:
    result = reference.forward(inputs, options, training=True)
    gradients = reference.backward(grad, inputs, result, options)._asdict()
    return {"out": result.out, **{f"grad_{name}": x for name, x in gradients.items() if x is not None}}


def _plain(inputs: Inputs, options: Options, grad: Tensor) -> dict[str, Tensor]:
    """The equations with every tensor in the dtype of the inputs, and gradients by autograd."""
    query, key, value, gate = (x.detach().clone().requires_grad_() for x in inputs[:4])
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    if inputs.key_mask is not None:
        visible = visible & inputs.key_mask[:, None, None]
    score = query @ keys.mT * options.scale
    keep = visible & (score > options.threshold)
    member = keep.to(score.dtype)
    if options.straight_through > 0.0:
        soft = torch.sigmoid((score - options.threshold) / options.straight_through).masked_fill(~visible, 0.0)
        member = member + soft - soft.detach()
    distance = member.flip(-1).cumsum(-1).flip(-1) - keep.to(score.dtype)
    logits = score + gate[..., None].to(score.dtype) * distance
    kept_any = keep.any(-1, keepdim=True)
    counts = keep | (visible & ~kept_any)  # a row that keeps nothing is compared with its largest visible score
    largest = logits.detach().masked_fill(~counts, -torch.inf).amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    weights = (logits - largest).masked_fill(~visible, 0.0).exp() * member
    out = (weights / weights.sum(-1, keepdim=True).where(kept_any, 1.0)) @ values
    leaves = {"grad_query": query, "grad_key": key, "grad_value": value, "grad_log_gate": gate}
    gradients = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def _in_double(inputs: Inputs) -> Inputs:
    return inputs._replace(**{name: getattr(inputs, name).double() for name in ("query", "key", "value", "log_gate")})


def _distance(ours: Tensor, exact: Tensor) -> tuple[float, float]:
    """The root mean square of all errors and the largest, relative to the largest number; NaN if something is NaN."""
    difference = (ours.double() - exact) / exact.abs().max()
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


def _place(device: torch.device) -> Path:
    """Beside Triton's cache, by everything that a verdict may depend on."""
    import triton

    what = (
        _device_name(device),
        driver(),
        torch.__version__,
        triton.__version__,
        __version__,
        _sources(),
    )
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return Path(triton.knobs.cache.dir) / "threshold-relative-attention" / f"{name}.json"


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"interpreter on {platform.machine()}"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.major}.{properties.minor}"


def driver() -> str:
    """As the kernel modules of NVIDIA and AMD name themselves; neither has a public interface in PyTorch."""
    for place in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/nvidia/version"):
        try:
            return Path(place).read_text().splitlines()[0]
        except (OSError, IndexError):
            continue
    return "unknown"


@cache
def _sources() -> str:
    """A digest of the kernels: sources may change without the version."""
    folder = Path(__file__).parent
    texts = (path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _stored(device: torch.device, dtype: torch.dtype, kind: str) -> Verdict | None:
    try:
        stored = json.loads(_place(device).read_text())
        return Verdict(**stored[f"{str(dtype).removeprefix('torch.')} {kind}"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(device: torch.device, verdict: Verdict) -> Verdict:
    """Keep a verdict for other processes, unless the kernel could not run at all, which may be a matter of the moment.

    A folder that cannot be written is no reason to fail.
    """
    if not verdict.ran:
        return verdict
    place = _place(device)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            stored = json.loads(place.read_text())
        except (OSError, ValueError):
            stored = {}
        stored[f"{verdict.dtype} {verdict.kind}"] = verdict._asdict()
        aside = place.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(stored, indent=1))
        aside.replace(place)
    except OSError:
        pass
    return verdict

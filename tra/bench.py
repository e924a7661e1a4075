"""Speed of the operator and of whole training steps, as ratios measured in one interleaved run.

Both sides of a ratio run in turn, and medians are compared, because machines are noisy. A kernel that fails a quick
check of its results gets no ratio.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from tra.errors import RunError
from tra.figures import time_by_length
from tra.memory import measurable
from tra.model import Decoder, DecoderConfig, sized
from tra.ops import threshold_relative_attention
from tra.report import environment, write_json

WIDTH = 64
BOUND = math.sqrt(WIDTH)
Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One comparison. A ratio below 1 means that TRA is faster."""

    what: str
    shape: str
    against: str
    milliseconds: float
    against_milliseconds: float
    goal: float | None
    """Largest ratio wanted, where one is set."""

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.against_milliseconds

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"  (goal {self.goal:g})"
        return (
            f"{self.what:<44} {self.shape:<14} {self.milliseconds:>10.3f} ms   {self.against:<16}"
            f"{self.against_milliseconds:>10.3f} ms   {self.ratio:.4g}x{goal}"
        )


def run(folder: Path, seconds: float, only: str, console: Console) -> dict[str, Any]:
    """Measure every row whose name contains ``only``, and write ``bench.json`` and ``bench.png``."""
    check()
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for what, shape, goal, ours, others in cases():
        if only not in what:
            continue
        for against, theirs in others().items():
            mine, other = interleaved(ours(), theirs, seconds)
            rows.append(Row(what, shape, against, mine * 1e3, other * 1e3, goal if against in MAIN else None))
            console.print(str(rows[-1]), highlight=False)
    content: dict[str, Any] = {
        "command": f"tra bench --seconds {seconds:g}" + (f" --only '{only}'" if only else ""),
        "environment": environment(),
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
    }
    if not only:
        content["share_of_sgemm"] = share_of_sgemm(seconds)
        console.print(f"share of the machine's sgemm rate when every key is visited: {content['share_of_sgemm']:.2f}")
        content["peak_memory_megabytes"] = {
            "default tolerance": peak_memory(every_key=False),
            "every key": peak_memory(every_key=True),
        }
        console.print(f"forward + backward of 1x8x32768: {content['peak_memory_megabytes']} MB")
    write_json(folder / "bench.json", content)
    time_by_length(content["rows"], folder / "bench.png")
    return content


MAIN = ("SDPA", "RoPE on SDPA")


def check() -> None:
    """Compare the fast implementation with the reference, forward and backward, on scores that are exact."""
    rng = torch.Generator().manual_seed(0)
    shape = (2, 3, 111, 16)
    query, key = (torch.randint(-1, 2, shape, generator=rng).float() for _ in range(2))
    value, gate = torch.randn(shape, generator=rng), -torch.rand(shape[:3], generator=rng)
    results = []
    for impl in ("auto", "reference"):
        leaves = [x.clone().requires_grad_() for x in (query, key, value, gate)]
        out = threshold_relative_attention(*leaves, impl=impl)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for ours, right in zip(*results, strict=True):
        if not torch.allclose(ours, right, rtol=1e-4, atol=1e-4):
            raise RunError("no figures: the kernel's results differ from the reference's")


def interleaved(ours: Work, theirs: Work, seconds: float) -> tuple[float, float]:
    """Median seconds of both, run in turn for about the given time, at least three times each."""
    ours()
    theirs()
    times: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    while len(times[0]) < 3 or (time.perf_counter() - began < seconds and len(times[0]) < 200):
        for work, taken in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    first, second = (sorted(taken)[len(taken) // 2] for taken in times)
    return first, second


Case = tuple[str, str, float | None, Callable[[], Work], Callable[[], dict[str, Work]]]


def cases() -> Iterator[Case]:
    for backward, limit in ((False, 1.0), (True, 1.1)):
        what = "forward + backward" if backward else "forward"
        for shape in ((8, 4, 512), (2, 8, 1024), (1, 8, 4096)):
            yield _attention_case(f"{what}, every key", shape, limit, backward, 0.0, listings=shape[2] <= 1024)
    for backward, goals in (
        (False, {(8, 4, 512): 3, (1, 8, 4096): 8, (1, 8, 16384): 25, (1, 4, 65536): 100}),
        (True, {(8, 4, 512): 2.5, (1, 8, 4096): 6, (1, 8, 16384): 20}),
    ):
        what = "forward + backward" if backward else "forward"
        for shape, speedup in goals.items():
            yield _attention_case(f"{what}, default tolerance", shape, 1 / speedup, backward, None)
    yield _growth_case(32768, 16384)
    yield _growth_case(65536, 32768)
    for batch in (1, 8):
        for cached, goal in ((4096, 0.2), (65536, 0.03)):
            yield _decode_case(batch, cached, goal)
    for cached in (4096, 65536):
        yield _generation_case("medium", cached)
    yield _training_case("mini", 16, 512, 0.9)
    yield _training_case("medium", 8, 128, 1.0)
    yield _training_case("medium", 8, 1024, 0.85)


def language_like(batch: int, heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random normalised queries and keys, with gates distributed as in a trained language model."""
    rng = torch.Generator().manual_seed(0)
    query = F.rms_norm(torch.randn(batch, heads, queries, WIDTH, generator=rng), (WIDTH,))
    key = F.rms_norm(torch.randn(batch, heads, keys, WIDTH, generator=rng), (WIDTH,))
    value = torch.randn(batch, heads, keys, WIDTH, generator=rng)
    gate = -torch.exp(math.log(0.7) + 1.1 * torch.randn(batch, heads, queries, generator=rng))
    return query, key, value, gate


def _attention_case(
    what: str,
    shape: tuple[int, int, int],
    goal: float,
    backward: bool,
    tolerance: float | None,
    listings: bool = False,
) -> Case:
    batch, heads, length = shape

    def prepare(rule: Callable[..., Tensor], gated: bool) -> Work:
        *tensors, gate = language_like(batch, heads, length, length)
        leaves = [x.requires_grad_(backward) for x in (*tensors, gate)][: 4 if gated else 3]
        grad = torch.ones(batch, heads, length, WIDTH)

        def work() -> None:
            out = rule(*leaves)
            if backward:
                torch.autograd.grad(out, leaves, grad)

        return work

    def ours() -> Work:
        return prepare(
            lambda *x: threshold_relative_attention(*x, tolerance=tolerance, score_bound=BOUND, impl="cpu"), True
        )

    def others() -> dict[str, Work]:
        found = {"SDPA": prepare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), False)}
        if listings:
            found["paper, eager"] = prepare(papers_listing, True)
            found["paper, compiled"] = prepare(torch.compile(papers_listing), True)
        return found

    return what, "x".join(map(str, shape)), goal, ours, others


def papers_listing(query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor) -> Tensor:
    """The mechanism as the paper writes it: dense matrices."""
    score = torch.relu(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).tril()
    keep = score.detach() > 0
    distance = keep.float().flip(-1).cumsum(-1).flip(-1)
    logits = torch.where(keep, score + log_gate[..., None] * distance, -torch.inf)
    return torch.where(keep, logits.softmax(-1), 0.0) @ value


def _forward(batch: int, heads: int, queries: int, keys: int) -> Work:
    tensors = language_like(batch, heads, queries, keys)
    return lambda: threshold_relative_attention(*tensors, score_bound=BOUND, impl="cpu")


def _growth_case(length: int, half: int) -> Case:
    return (
        "growth per doubling, default tolerance",
        f"1x4x{length}",
        None,
        lambda: _forward(1, 4, length, length),
        lambda: {f"itself at {half}": _forward(1, 4, half, half)},
    )


def _decode_case(batch: int, cached: int, goal: float) -> Case:
    def ours() -> Work:
        return torch.inference_mode()(_forward(batch, 8, 1, cached))

    def others() -> dict[str, Work]:
        query, key, value, _ = language_like(batch, 8, 1, cached)
        return {"SDPA": torch.inference_mode()(lambda: F.scaled_dot_product_attention(query, key, value))}

    return "decode one token", f"{batch}x8x{cached}", goal, ours, others


def _generation_case(size: str, cached: int) -> Case:
    return (
        f"new token of a {size} model",
        f"1x{cached}",
        None,
        lambda: new_token(sized(size, attention="tra"), cached),
        lambda: {"RoPE on SDPA": new_token(sized(size, attention="rope"), cached)},
    )


def new_token(config: DecoderConfig, cached: int) -> Work:
    """One step of generation: a token goes through a whole model whose cache holds so many random ones."""
    torch.manual_seed(0)
    model = Decoder(config).eval()
    cache = model.new_cache()
    head_width = config.width // config.heads
    for layer in cache:
        key, value = torch.randn(2, 1, config.heads, cached + 1, head_width)
        layer.append(F.rms_norm(key, (head_width,)), value)
        layer.crop(cached)  # with room for one more
    token = torch.zeros(1, 1, dtype=torch.int64)

    @torch.inference_mode()
    def work() -> None:
        model(token, cache=cache)
        for layer in cache:
            layer.crop(cached)

    return work


def _training_case(size: str, batch: int, length: int, goal: float) -> Case:
    def prepare(attention: str) -> Work:
        return training_step(sized(size, attention=attention, dropout=0.0), batch, length)

    return (
        f"training step, {size} model",
        f"{batch}x{length}",
        goal,
        lambda: prepare("tra"),
        lambda: {"RoPE on SDPA": prepare("rope")},
    )


def training_step(config: DecoderConfig, batch: int, length: int, device: str = "cpu") -> Work:
    """A whole step of training on random tokens: forward, loss, backward, optimiser."""
    torch.manual_seed(0)
    model = Decoder(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocabulary, (batch, length + 1)).to(device)

    def work() -> None:
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device != "cpu":
            torch.accelerator.synchronize()

    return work


def share_of_sgemm(seconds: float) -> float:
    """Multiply-adds per second of the forward that visits every key, over those of a large matrix product."""
    batch, heads, length, size = 1, 8, 4096, 2048
    tensors = language_like(batch, heads, length, length)
    square = torch.randn(size, size)
    ours, gemm = interleaved(
        lambda: threshold_relative_attention(*tensors, tolerance=0.0, score_bound=BOUND, impl="cpu"),
        lambda: square @ square,
        seconds,
    )
    pairs = batch * heads * length * (length + 1) // 2
    return (2 * pairs * WIDTH / ours) / (size**3 / gemm)


MEMORY_PROGRAM = """
import sys, torch
from tra.bench import BOUND, language_like
from tra.memory import added_megabytes
from tra.ops import threshold_relative_attention

def run(tensors, tolerance):
    leaves = [x.requires_grad_() for x in tensors]
    out = threshold_relative_attention(*leaves, tolerance=tolerance, score_bound=BOUND, impl="cpu")
    torch.autograd.grad(out, leaves, torch.ones(()).expand(out.shape))

run(language_like(1, 8, 256, 256), None)
tensors = language_like(1, 8, 32768, 32768)
print(round(added_megabytes(lambda: run(tensors, None if sys.argv[1] == "None" else 0.0))))
"""


def peak_memory(every_key: bool) -> int | None:
    """Megabytes that forward and backward of 32,768 tokens in 8 heads add to a process that holds the inputs.

    The output and the gradients alone are 4 x 67 MB. None where Linux's /proc is missing.
    """
    if not measurable():
        return None
    command = [sys.executable, "-c", MEMORY_PROGRAM, "0.0" if every_key else "None"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

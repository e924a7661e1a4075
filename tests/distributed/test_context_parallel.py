"""A sequence over several processes is the sequence of one process."""

import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from tests.distributed.processes import finish, run, start
from tests.distributed.threads import in_threads
from tra.distributed import ContextParallel
from tra.distributed.attention import sharded_attention
from tra.distributed.processes import Layout
from tra.ops import threshold_relative_attention

CASES = (
    "plain",
    "documents",
    "edges",
    "halves",
    "padding",
    "bf16",
    "learned",
    "heads",
    "norms",
    "spread",
    "loose",
    "high",
    "short",
    "empty",
    "damaged",
    "exact",
)
EDGES = ([0, 700], [0, 350, 700], [0, 192, 384, 700], [0, 13, 200, 640, 700], [0, 1, 2, 3, 700])
"""Of shards: with ends where sums of the kernel end, and of a single token."""


def tensors(case: str, length: int = 700) -> dict[str, Tensor]:
    """Of one call: query, key, value, log_gate, the gradient of the output, and what else the case has."""
    rng = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    query = torch.randn(2, 4, length, 16, generator=rng) * (12 if case == "spread" else 1)
    found = {
        "query": query.to(dtype),
        "key": torch.randn(2, 2, length, 16, generator=rng).to(dtype),
        "value": torch.randn(2, 2, length, 16, generator=rng).to(dtype),
        "log_gate": -torch.rand(2, 4, length, generator=rng),
        "grad": torch.randn(2, 4, length, 16, generator=rng).to(dtype),
    }
    found["log_gate"][1, :2] -= 1.0  # the first key head of the second sequence is done before the others
    if case == "documents":
        found["segment_ids"] = (torch.arange(length)[None] // torch.tensor([[97], [210]])).long() * 2**33
    if case == "edges":  # documents that end where shards do
        found["segment_ids"] = torch.stack([torch.arange(length) // 350, torch.arange(length) // 192])
    if case == "halves":  # one process asks nobody
        found["segment_ids"] = (torch.arange(length) // 350).expand(2, -1)
    if case in ("padding", "dropout"):
        found["key_mask"] = torch.rand(2, length, generator=rng) < 0.7
        found["key_mask"][1, :400] = False  # whole shards
    if case in ("learned", "bf16"):
        found["threshold"] = torch.randn(2, 4, length, generator=rng) * 0.3
    if case == "heads":
        found["threshold"] = torch.tensor([[-0.5], [0.3], [0.0], [1.0]])
    if case == "short":  # all rows end in their own shard
        found["key"] = found["query"][:, ::2].clone()
        found["query"] = found["key"].repeat_interleave(2, dim=1)
        found["log_gate"] -= 90.0
    if case == "empty":
        found["threshold"] = torch.where(torch.rand(2, 4, length, generator=rng) < 0.5, 30.0, 0.0)
    if case == "damaged":
        for name, where, number in (
            ("key", (0, 0, 170), torch.nan),
            ("value", (1, 1, 300), torch.inf),
            ("query", (0, 3, 650), torch.nan),
            ("value", (0, 0, 699), torch.nan),
        ):
            found[name][(*where, 2)] = number
        found["log_gate"][1, 0, 345] = -torch.inf
    return found


def options(case: str) -> dict[str, float]:
    bound = {} if case in ("norms", "spread") else {"score_bound": 30.0 if case == "loose" else 19.0}
    soft = 0.5 if case in ("plain", "learned", "padding", "bf16", "heads", "short", "empty", "damaged") else 0.0
    # The bound less the threshold is within what a walk in pieces takes, but not with the bound's slack.
    high = {"score_bound": 1000.0, "threshold": 960.6}
    rest = {"dropout": {"dropout": 0.3}, "exact": {"tolerance": 0.0}, "high": high}.get(case, {})
    return {"straight_through": soft, **bound, **rest}


def on_shard(shards: ContextParallel, case: str, edges: list[int]) -> dict[str, Tensor]:
    """The output of this process's rows and its gradients."""
    own = slice(edges[shards.rank], edges[shards.rank + 1])
    mine = {
        name: x if x.shape[-1] == 1 else x[:, own] if x.dim() == 2 else x[:, :, own]
        for name, x in tensors(case).items()
    }
    grad, mask, ids = mine.pop("grad"), mine.pop("key_mask", None), mine.pop("segment_ids", None)
    leaves = {name: x.clone().requires_grad_() for name, x in mine.items()}
    layout = shards.layout(leaves["log_gate"].transpose(1, 2), mask, ids)
    out = sharded_attention(shards, layout, **leaves, **options(case))
    out.backward(grad)
    return {"out": out.detach(), **{name: x.grad for name, x in leaves.items() if x.grad is not None}}


def check(case: str, edges: list[int], parts: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    """The parts of all processes against what one call found."""
    for name, whole in expected.items():
        found = [part[name] for part in parts]
        joined = torch.stack(found).sum(0) if whole.dim() == 2 else torch.cat(found, 2)
        tolerance = 0.0
        # Sums over rows of several processes; where scores may span too much, all keys are walked at once.
        if name in ("key", "value") or whole.dim() == 2 or (case in ("spread", "loose") and name != "out"):
            tolerance = {"bf16": 2e-2, "spread": 1e-4, "loose": 1e-4}.get(case, 1e-5)
        near = {"rtol": tolerance, "atol": tolerance * (50 if whole.dim() == 2 else 0.5)}
        assert_close(joined, whole, **near, equal_nan=True, msg=lambda said, name=name: f"{edges} {name}: {said}")


def of_one_call(case: str) -> dict[str, Tensor]:
    given = tensors(case)
    grad, masks = given.pop("grad"), {n: given.pop(n) for n in ("key_mask", "segment_ids") if n in given}
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    torch.manual_seed(1)  # of dropout
    out = threshold_relative_attention(**leaves, **masks, **options(case))
    out.backward(grad)
    return {"out": out.detach(), **{name: x.grad for name, x in leaves.items() if x.grad is not None}}


@pytest.mark.parametrize("case", CASES)
def test_shards_have_the_bits_of_one_call(case: str) -> None:
    expected = of_one_call(case)
    assert expected["out"].isnan().any() == (case == "damaged")
    for edges in EDGES:
        torch.manual_seed(1)
        check(case, edges, in_threads(len(edges) - 1, 40, partial(on_shard, case=case, edges=edges)), expected)


def test_heads_that_are_done_ask_for_no_more_keys() -> None:
    gates = -torch.tensor([90.0, 1e-4]).view(1, 2, 1).expand(1, 2, 200)

    def sent(shards: ContextParallel) -> int:
        query = torch.ones(1, 2, 200, 8)
        sharded_attention(shards, shards.layout(query[:, 0]), query, query, query, gates, score_bound=9.0)
        return shards.traffic.bytes

    assert in_threads(2, 16, sent)[0] == (2 * 16 + (200 - 16)) * 16 * 4  # keys of both heads, then of one


PROGRAM = """
from safetensors.torch import save_file
from tests.distributed.test_context_parallel import EDGES, PROCESSES, on_shard
from tra.distributed import ContextParallel
for case, number in PROCESSES:
    size = len(EDGES[number]) - 1
    group = dist.new_group(list(range(size)))
    if rank < size:
        torch.manual_seed(1)
        found = on_shard(ContextParallel(group, timeout=200, chunk=100), case, EDGES[number])
        save_file({name: x.contiguous() for name, x in found.items()}, folder / f"{case}-{number}-{rank}.safetensors")
dist.barrier()
"""
PROCESSES = [("plain", 0), ("padding", 1), ("bf16", 2), ("learned", 3), ("dropout", 3), ("norms", 3), ("spread", 1)]
"""Which case over which edges: 1, 2, 3 and 4 processes."""


def test_processes_have_the_bits_of_one_process(tmp_path: Path) -> None:
    run(PROGRAM, 4, tmp_path)
    for case, number in PROCESSES:
        parts = [load_file(tmp_path / f"{case}-{number}-{rank}.safetensors") for rank in range(len(EDGES[number]) - 1)]
        check(case, EDGES[number], parts, of_one_call(case))


def test_shards_that_do_not_fit_together_are_refused_in_every_process() -> None:
    def other(shards: ContextParallel, what: str) -> str:
        tokens = torch.zeros(1, 3, 4)
        if what == "chunk":
            shards.chunk += shards.rank
        with (
            torch.autocast("cpu", torch.float16, enabled=what == "dtype" and shards.rank == 1),
            pytest.raises(ValueError, match="all shards must have the same") as refused,
        ):
            shards.layout(tokens)
        return str(refused.value)

    for what, here, there in (("chunk", "16", "17"), ("dtype", "torch.float32", "torch.float16")):
        zero, one = in_threads(2, 16, partial(other, what=what))
        assert zero == f"all shards must have the same {what}: {here} at rank 0, {there} at rank 1"
        assert one == f"all shards must have the same {what}: {there} at rank 1, {here} at rank 0"


def test_a_document_that_begins_in_the_shard_asks_nobody() -> None:
    starts = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4]])
    layout = Layout(0, [4, 2, 2], 1, starts=starts)
    assert [layout.asks_at_all(rank) for rank in range(3)] == [False, False, True]
    assert layout.requests(2) == [(1, 5, 6), (1, 4, 5), (0, 0, 4)]


FAULT = """
from tra.distributed import ContextParallel
from tra.distributed.attention import sharded_attention
shards = ContextParallel(timeout=15, chunk=16)
torch.manual_seed(rank)
q = torch.randn(1, 2, 64, 8)
layout = shards.layout(q[:, 0])
turn = 0
while True:
    sharded_attention(shards, layout, q, q, q, -torch.full((1, 2, 64), 1e-4), score_bound=30.0)
    turn += 1
    if turn == 3:
        (folder / f"ready-{rank}").touch()
"""


def test_a_process_that_is_killed_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    processes = start(FAULT, 4, tmp_path)
    until = time.monotonic() + 240
    while time.monotonic() < until and not all((tmp_path / f"ready-{rank}").exists() for rank in range(4)):
        time.sleep(0.05)
    killed = time.monotonic()
    processes[2].send_signal(signal.SIGKILL)
    found = finish(processes, 110)
    assert time.monotonic() - killed < 100
    for rank in (0, 1, 3):
        code, _, errors = found[rank]
        assert code == 1, (rank, code, errors)
        assert "rank 2 of the 4 processes that share a sequence is gone" in errors, (rank, errors)


WRONG = """
from tra.distributed import ContextParallel, context_parallel
from tra.model import Decoder, DecoderConfig
shards = ContextParallel(timeout=200)
def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
dtype = torch.float32 if rank == 0 else torch.bfloat16
print(message(lambda: shards.layout(torch.zeros(1, 3, 4, dtype=dtype))))
print(message(lambda: shards.layout(torch.zeros(1, 3, 4), torch.ones(1, 3, dtype=torch.bool) if rank else None)))
print(message(lambda: shards.layout(torch.zeros(1, rank, 4))))
print(message(lambda: shards.shard(torch.zeros(1, 1))))
print(message(lambda: ContextParallel(chunk=0)))
with context_parallel(shards):
    selective = Decoder(DecoderConfig(vocabulary=6, layers=1, heads=1, width=8, attention="selective"))
    print(message(lambda: selective(torch.zeros(1, 3, dtype=torch.long))))
    tra = Decoder(DecoderConfig(vocabulary=6, layers=1, heads=1, width=8))
    cache = tra.new_cache()
    for layer in cache:
        layer.append(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
    tokens = torch.zeros(1, 3, dtype=torch.long)
    print(message(lambda: tra(tokens, cache=cache)))
    print(message(lambda: tra(tokens, cache=cache if rank else None)))
    print(message(lambda: tra(tokens, cache=cache, segment_ids=torch.zeros(1, 4, dtype=torch.long))))
from contextlib import nullcontext
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as by_pytorch, implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
rng = torch.Generator().manual_seed(0)
query = torch.randn(1, 2, 64, 16, generator=rng)
def attention(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
whole = attention(query)
for kernel, tensors in ((nullcontext(), nullcontext()), (sdpa_kernel(SDPBackend.MATH), nullcontext()),
                        (sdpa_kernel(SDPBackend.MATH), implicit_replication())):
    mine, place = query.clone(), torch.arange(64)[None].clone()
    try:
        with by_pytorch(init_device_mesh("cpu", (2,)), buffers=[mine, place], buffer_seq_dims=[2, 1]), kernel, tensors:
            print(torch.allclose(attention(mine), whole[:, :, place[0]], atol=0.1))
    except (NotImplementedError, RuntimeError) as error:
        print(type(error).__name__)
dist.barrier()
"""


def test_wrong_shards_are_refused_in_every_process(tmp_path: Path) -> None:
    for out in run(WRONG, 2, tmp_path):
        lines = out.splitlines()
        assert "all shards must have the same dtype: torch." in lines[0]
        assert "all shards must have the same key_mask or none" in lines[1]
        assert "every process must hold at least one token, rank 0 holds none" in lines[2]
        assert "at least a token for each of 2 processes, got 1" in lines[3]
        assert "chunk must be at least 1, got 0" in lines[4]
        assert "attention must not be SelectiveAttention in context_parallel: its tokens change" in lines[5]
        assert "cache must be None where processes share sequences and gradients are recorded" in lines[6]
        assert "the same number of cached tokens (-1 without a cache): " in lines[7]
        assert "segment_ids must be None behind a cache" in lines[8]
        # A PyTorch that serves one of these on the CPU could serve the baselines there: by its own choice of kernel, by
        # matrix products, and by those with tensors taken for replicas, where it gives wrong numbers.
        assert lines[9:] == ["NotImplementedError", "RuntimeError", "False"]


def test_without_a_process_group_it_says_so() -> None:
    from tra.distributed import ContextParallel

    with pytest.raises(ValueError, match="init_process_group"):
        ContextParallel()

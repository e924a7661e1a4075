"""A sequence over several processes is the sequence of one process."""

import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.distributed.processes import finish, run, start
from tra.distributed.processes import Layout
from tra.ops import threshold_relative_attention

CASES = ("plain", "documents", "padding", "bf16", "learned", "norms", "spread")


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
    if case == "documents":
        found["segment_ids"] = (torch.arange(length)[None] // torch.tensor([[97], [210]])).long() * 2**33
    if case == "padding":
        found["key_mask"] = torch.rand(2, length, generator=rng) < 0.7
    if case == "learned":
        found["threshold"] = torch.randn(2, 4, length, generator=rng) * 0.3
    return found


def options(case: str) -> dict[str, float]:
    bound = {} if case in ("norms", "spread") else {"score_bound": 20.0}
    return {"straight_through": 0.5 if case in ("plain", "learned", "padding") else 0.0, **bound}


PROGRAM = """
from safetensors.torch import load_file, save_file
from tests.distributed.test_context_parallel import options
from tra.distributed import ContextParallel
from tra.distributed.attention import sharded_attention
shards = ContextParallel(timeout=200, chunk=40)
edges = [int(edge) for edge in sys.argv[5].split(",")]
for case in sys.argv[4].split(","):
    whole = load_file(folder / f"{case}.safetensors")
    mine = {name: x[:, edges[rank]:edges[rank + 1]] if x.dim() == 2 else x[:, :, edges[rank]:edges[rank + 1]]
            for name, x in whole.items()}
    grad, mask, ids = mine.pop("grad"), mine.pop("key_mask", None), mine.pop("segment_ids", None)
    leaves = {name: x.clone().requires_grad_() for name, x in mine.items()}
    layout = shards.layout(leaves["log_gate"].transpose(1, 2), mask, ids)
    out = sharded_attention(shards, layout, **leaves, **options(case))
    out.backward(grad)
    save_file({"out": out.detach().contiguous(), **{n: x.grad.contiguous() for n, x in leaves.items()}},
              folder / f"{case}-{rank}.safetensors")
print(shards.traffic.bytes, shards.traffic.rounds)
dist.barrier()
"""


@pytest.mark.parametrize("edges", [[0, 700], [0, 350, 700], [0, 13, 200, 640, 700]], ids=["1", "2", "4"])
def test_forward_has_the_bits_of_one_process(tmp_path: Path, edges: list[int]) -> None:
    for case in CASES:
        save_file({name: x.contiguous() for name, x in tensors(case).items()}, tmp_path / f"{case}.safetensors")
    run(PROGRAM, len(edges) - 1, tmp_path, ",".join(CASES), ",".join(map(str, edges)))
    for case in CASES:
        given = tensors(case)
        grad, masks = given.pop("grad"), {n: given.pop(n) for n in ("key_mask", "segment_ids") if n in given}
        leaves = {name: x.requires_grad_() for name, x in given.items()}
        out = threshold_relative_attention(**leaves, **masks, **options(case))
        out.backward(grad)
        parts = [load_file(tmp_path / f"{case}-{rank}.safetensors") for rank in range(len(edges) - 1)]
        found = {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}
        assert torch.equal(found["out"], out), case
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            # Keys and values get sums over rows of several processes; "spread" walks all keys at once.
            if name not in ("key", "value") and case != "spread":
                assert torch.equal(found[name], leaf.grad), (case, name)
            tolerance = {"bf16": 2e-2, "spread": 1e-4}.get(case, 1e-5)
            torch.testing.assert_close(found[name], leaf.grad, rtol=tolerance, atol=tolerance * 0.5)


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
    rope = Decoder(DecoderConfig(vocabulary=6, layers=1, heads=1, width=8, attention="rope"))
    print(message(lambda: rope(torch.zeros(1, 3, dtype=torch.long))))
    tra = Decoder(DecoderConfig(vocabulary=6, layers=1, heads=1, width=8))
    cache = tra.new_cache()
    for layer in cache:
        layer.append(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
    print(message(lambda: tra(torch.zeros(1, 3, dtype=torch.long), cache=cache)))
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as by_pytorch
query = torch.zeros(1, 2, 64, 16)
try:
    with by_pytorch(init_device_mesh("cpu", (2,)), buffers=[query], buffer_seq_dims=[2]):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
except NotImplementedError as error:
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
        assert "RotaryAttention" in lines[5]
        assert "on CUDA only" in lines[5]
        assert "cache must be empty for sequences that processes share, it holds 1 tokens" in lines[6]
        assert lines[7] == "NotImplementedError"  # a PyTorch that serves this could serve the baselines on the CPU


def test_without_a_process_group_it_says_so() -> None:
    from tra.distributed import ContextParallel

    with pytest.raises(ValueError, match="init_process_group"):
        ContextParallel()

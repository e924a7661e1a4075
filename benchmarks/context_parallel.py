"""Bytes, hops, memory and time of one sequence over several processes, and an estimate for many.

    python benchmarks/context_parallel.py measure --lengths 16384 65536 --processes 1 2 4
    python benchmarks/context_parallel.py estimate

Ring attention sends every key and value P - 1 times. Here a process asks for keys as long as one of its rows needs
them. Gates are language-like, -g = exp(Normal(ln 0.7, 1.1)); half of the keys are kept.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time

import torch

HEADS, WIDTH, CHUNK = 4, 64, 1024


def gates(heads: int, count: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return -(torch.randn(1, heads, count, generator=rng) * 1.1 + math.log(0.7)).exp()


def one_process(rank: int, count: int, length: int, folder: str, backward: bool) -> None:
    """Walk this process's part of the sequence and print what it took, as JSON."""
    import torch.distributed as dist

    from tra.distributed import ContextParallel
    from tra.distributed.attention import sharded_attention

    store = dist.FileStore(os.path.join(folder, "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    shards = ContextParallel(chunk=CHUNK)
    begin, end = (length * each // count for each in (rank, rank + 1))
    rng = torch.Generator().manual_seed(rank)
    query, key, value = (
        torch.nn.functional.rms_norm(torch.randn(1, HEADS, end - begin, WIDTH, generator=rng), (WIDTH,)) for _ in "qkv"
    )
    leaves = [x.requires_grad_(backward) for x in (query, key, value)]
    log_gate = gates(HEADS, end - begin, seed=rank)
    layout = shards.layout(query[:, 0])
    dist.barrier()
    before, started = peak_megabytes(), time.perf_counter()
    out = sharded_attention(shards, layout, *leaves, log_gate, score_bound=math.sqrt(WIDTH))
    forward = time.perf_counter() - started
    sent = shards.traffic.bytes
    if backward:
        out.backward(torch.ones_like(out))
    traffic = shards.traffic
    found = {"forward_bytes": sent, "bytes": traffic.bytes, "rounds": traffic.rounds, "hops": traffic.hops}
    found |= {"forward_seconds": forward, "seconds": time.perf_counter() - started}
    print(json.dumps(found | {"added_megabytes": peak_megabytes() - before}), flush=True)
    dist.barrier()


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(lengths: list[int], processes: list[int], backward: bool) -> None:
    print("tokens     processes  sent MB  ring MB  share   hops  peak MB a process  time against one process")
    for length in lengths:
        alone = None
        for count in processes:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "process", str(length), str(count), folder, str(int(backward))]
                running = [
                    subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(count)
                ]
                found = [json.loads(process.communicate()[0]) for process in running]
            kind = "" if backward else "forward_"
            sent, seconds = sum(x[f"{kind}bytes"] for x in found), max(x[f"{kind}seconds"] for x in found)
            alone = seconds if alone is None else alone
            # Keys and values in float32, P - 1 times; with backward again, and as many gradients come back.
            ring = (3 if backward else 1) * (count - 1) * length * HEADS * 2 * WIDTH * 4
            share = f"{sent / ring:7.2%}" if ring else "      -"
            peak, hops = max(x["added_megabytes"] for x in found), max(x["hops"] for x in found) / (1 + backward)
            print(
                f"{length:>9,}  {count:>9}  {sent / 1e6:>7.1f}  {ring / 1e6:>7.1f}  {share}  {hops:>4.0f}"
                f"  {peak:>17.0f}  {seconds / alone:.2f}x",
                flush=True,
            )


def reaches(count: int, seed: int = 0, keep: float = 0.5) -> torch.Tensor:
    """How many keys back rows read: the kept keys of the certified stop, over the share of keys that is kept."""
    tolerance = torch.finfo(torch.float32).eps
    odds = math.sqrt(WIDTH) * 1.001 + math.log(2 / tolerance)
    return (odds / -gates(1, count, seed)[0, 0]).ceil() / keep


def estimate(lengths: list[int], processes: list[int], heads: int = 32) -> None:
    """A simulation, not a measurement: rows of `heads` heads, requests that double, owners that are never late."""
    sample = reaches(1 << 20).sort().values
    print("tokens       processes  tokens each  median hops  most hops  share of ring attention's bytes")
    for length in lengths:
        for count in processes:
            size = length // count
            if size < 1:
                continue
            # The farthest that a row of a shard reads beyond its shard: its reach less its place. A shard has
            # size x heads rows with gates of their own; a row at place p goes on by reach - p.
            rng = torch.Generator().manual_seed(count)
            beyond = []
            near = min(size, 1 << 16)
            for _ in range(min(count - 1, 8)):
                rows = sample[torch.randint(len(sample), (near, heads), generator=rng)]
                beyond.append(float((rows.amax(1) - torch.arange(near)).amax()))
            read, hops = [], []
            for rank, far in enumerate(beyond, 1):
                place = rank * (count - 1) // len(beyond) * size
                asked, chunk = 0.0, CHUNK
                while asked < min(far, place):
                    asked, chunk = asked + min(chunk, size - asked % size), 2 * chunk
                asked = min(asked, place)
                read.append(asked)
                hops.append(math.ceil(asked / size))
            share = sum(read) / len(read) / (size * (count - 1))
            middle = sorted(hops)[len(hops) // 2]
            print(f"{length:>11,}  {count:>9,}  {size:>11,}  {middle:>11}  {max(hops):>9}  {share:.3%}")


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        length, count, folder, backward, rank = sys.argv[2:]
        torch.set_num_threads(1)
        one_process(int(rank), int(count), int(length), folder, backward == "1")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "estimate"])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--processes", type=int, nargs="+")
    parser.add_argument("--backward", action="store_true")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.lengths or [16_384, 65_536], given.processes or [1, 2, 4], given.backward)
    else:
        estimate(given.lengths or [1 << 20, 1 << 24], given.processes or [8, 64, 256, 1024])


if __name__ == "__main__":
    main()

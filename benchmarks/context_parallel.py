"""Bytes, hops, memory and time of one sequence over several processes, and an estimate for many.

    python benchmarks/context_parallel.py measure --lengths 16384 65536 --processes 1 2 4
    python benchmarks/context_parallel.py estimate
    ... --run pretrained:text

Ring attention sends every key and value P - 1 times. Here a process asks for keys as long as one of its rows needs
them. Time is that of the processor: on a machine with fewer cores than processes, and through its own memory, no
other can be shown. Gates are language-like, -g = exp(Normal(ln 0.7, 1.1)), and half of the keys are kept; or they are
a trained model's own, on the text that it is measured on (TRA_DATA names a folder that holds it).
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
    before, started = peak_megabytes(), time.process_time()
    out = sharded_attention(shards, layout, *leaves, log_gate, score_bound=math.sqrt(WIDTH))
    forward = time.process_time() - started
    sent = shards.traffic.bytes
    if backward:
        out.backward(torch.ones_like(out))
    traffic = shards.traffic
    found = {"forward_bytes": sent, "bytes": traffic.bytes, "rounds": traffic.rounds, "hops": traffic.hops}
    found |= {"forward_seconds": forward, "seconds": time.process_time() - started}
    print(json.dumps(found | {"added_megabytes": peak_megabytes() - before}), flush=True)
    dist.barrier()


@torch.inference_mode()
def one_process_of_model(rank: int, count: int, length: int, folder: str, run: str) -> None:
    """Read this process's part of a trained model's own text and print what all its layers took together, as JSON."""
    import torch.distributed as dist

    from tra.bench.trained import own_tokens
    from tra.distributed import ContextParallel, context_parallel
    from tra.runs import load_run

    store = dist.FileStore(os.path.join(folder, "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    loaded = load_run(run)
    model, tokens = loaded.model.eval(), own_tokens(loaded, length)
    shards = ContextParallel(chunk=CHUNK)
    dist.barrier()
    before, started = peak_megabytes(), time.process_time()
    with context_parallel(shards):
        model.hidden(shards.shard(tokens))
    traffic, config = shards.traffic, model.config
    keys = config.layers * (config.kv_heads or config.heads) * 2 * (config.width // config.heads) * 4
    found = {"forward_bytes": traffic.bytes, "hops": traffic.hops / max(1, traffic.calls), "token_bytes": keys}
    found |= {"forward_seconds": time.process_time() - started, "added_megabytes": peak_megabytes() - before}
    print(json.dumps(found), flush=True)
    dist.barrier()


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(lengths: list[int], processes: list[int], backward: bool, run: str) -> None:
    print(
        "tokens     processes  sent MB  ring MB  share   hops  added MB a process  CPU time: all  slowest, against one"
    )
    for length in lengths:
        alone = None
        for count in processes:
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    __file__,
                    "process",
                    str(length),
                    str(count),
                    folder,
                    str(int(backward)),
                    run,
                ]
                running = [
                    subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(count)
                ]
                found = [json.loads(process.communicate()[0]) for process in running]
            kind = "" if backward else "forward_"
            sent, seconds = sum(x[f"{kind}bytes"] for x in found), [x[f"{kind}seconds"] for x in found]
            alone = seconds[0] if alone is None else alone
            # Keys and values in float32, P - 1 times; with backward again, and as many gradients come back.
            token = found[0].get("token_bytes", HEADS * 2 * WIDTH * 4)
            ring = (3 if backward else 1) * (count - 1) * length * token
            share = f"{sent / ring:7.2%}" if ring else "      -"
            peak, hops = max(x["added_megabytes"] for x in found), max(x["hops"] for x in found) / (1 + backward)
            print(
                f"{length:>9,}  {count:>9}  {sent / 1e6:>7.1f}  {ring / 1e6:>7.1f}  {share}  {hops:>4.3g}"
                f"  {peak:>18.0f}  {sum(seconds) / alone:>12.2f}x  {max(seconds) / alone:.2f}x",
                flush=True,
            )


def stop_counts(gate: torch.Tensor, width: int) -> torch.Tensor:
    """How many kept keys the certified stop lets a row read, from its log_gate; float32 rounding, normalised heads."""
    tolerance = torch.finfo(torch.float32).eps
    odds = math.sqrt(width) * 1.001 + math.log(2 / tolerance)
    return (odds / -gate.clamp(max=-1e-30)).ceil()


def drawn_reaches(rows: int, heads: int, keep: float = 0.5) -> list[torch.Tensor]:
    """How many keys back the farthest head of each row reads, with language-like gates."""
    return [(stop_counts(gates(heads, rows)[0], WIDTH) / keep).amax(0)]


@torch.inference_mode()
def own_reaches(run: str, length: int, rows: int) -> list[torch.Tensor]:
    """For each layer of a trained model, how many keys back the farthest head of a row reads in its own text.

    Rows are drawn from the second half. One that does not find its keys within the text would go on at the rate at
    which it has kept keys so far.
    """
    from tra.bench.trained import layers_of, own_tokens
    from tra.runs import load_run

    loaded = load_run(run)
    model = loaded.model.eval()
    layers = layers_of(model, own_tokens(loaded, length))
    place = torch.randint(length // 2, length, (rows,), generator=torch.Generator().manual_seed(0)).sort().values
    found = []
    for layer in layers:
        width = layer.query.shape[3]
        farthest = torch.zeros(rows)
        for head in range(layer.query.shape[1]):
            key = layer.key[0, head * layer.key.shape[1] // layer.query.shape[1]]
            threshold = torch.as_tensor(layer.threshold).expand(layer.query.shape[:3])[0, head]
            for at in torch.arange(rows).split(64):
                score = layer.query[0, head, place[at]] @ key.T / math.sqrt(width)
                kept = (score > threshold[place[at], None]) & (torch.arange(length) <= place[at, None])
                wanted = stop_counts(layer.log_gate[0, head, place[at]], width)
                farthest[at] = torch.maximum(farthest[at], reach_of(kept, place[at], wanted))
        found.append(farthest)
    return found


def reach_of(kept: torch.Tensor, place: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How many keys back from its place each row finds so many kept keys, ``kept [rows, keys]``."""
    counted = kept.flip(1).cumsum(1)  # from the far end of the text, where nothing is kept before the row's place
    total = counted[:, -1]
    first = torch.searchsorted(counted, wanted.minimum(total)[:, None].to(counted.dtype))[:, 0]
    reach = (first - (kept.shape[1] - 1 - place)).float() + 1
    rate = total.clamp(min=1) / (place + 1)
    return torch.where(wanted <= total, reach, wanted / rate)


def simulate(sample: torch.Tensor, length: int, count: int, draws: int = 8) -> tuple[list[int], float]:
    """Hops of some shards, and the mean number of keys that a shard asks for.

    The farthest that a row of a shard reads beyond its shard is its reach less its place. Requests double, and owners
    are never late.
    """
    size = length // count
    rng = torch.Generator().manual_seed(count)
    near = min(size, 1 << 20)
    hops, read = [], []
    for draw in range(1, min(count - 1, draws) + 1):
        rows = sample[torch.randint(len(sample), (near,), generator=rng)]
        far = float((rows - torch.arange(near)).amax())
        before = draw * (count - 1) // min(count - 1, draws) * size
        asked, chunk = 0.0, CHUNK
        while asked < min(far, before):
            asked, chunk = asked + min(chunk, size - asked % size), 2 * chunk
        read.append(min(asked, before))
        hops.append(math.ceil(read[-1] / size))
    return hops, sum(read) / len(read)


def estimate(samples: list[torch.Tensor], lengths: list[int], processes: list[int]) -> None:
    """A simulation, not a measurement. Of several layers: the mean of bytes, hops of all."""
    ranked = torch.cat(samples).sort().values
    shown = ", ".join(f"{q:.1%} {ranked[int(q * (len(ranked) - 1))]:,.0f}" for q in (0.5, 0.9, 0.99, 0.999))
    print(f"reach of a row in keys: {shown}, most {ranked[-1]:,.0f}")
    print("tokens       processes  tokens each  median hops  most hops  share of ring attention's bytes")
    for length in lengths:
        for count in processes:
            found = [simulate(sample, length, count) for sample in samples]
            hops = sorted(hop for each, _ in found for hop in each)
            share = sum(read for _, read in found) / len(found) / (length // count * (count - 1))
            print(
                f"{length:>11,}  {count:>9,}  {length // count:>11,}  {hops[len(hops) // 2]:>11}  {hops[-1]:>9}"
                f"  {share:.3%}"
            )


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        length, count, folder, backward, run, rank = sys.argv[2:]
        torch.set_num_threads(1)
        if run:
            one_process_of_model(int(rank), int(count), int(length), folder, run)
        else:
            one_process(int(rank), int(count), int(length), folder, backward == "1")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "estimate"])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--processes", type=int, nargs="+")
    parser.add_argument("--backward", action="store_true", help="of drawn gates only")
    parser.add_argument("--run", default="", help="a trained run on text, as pretrained:text")
    parser.add_argument("--text", type=int, default=16_384, help="tokens of the run's text in which reaches are found")
    parser.add_argument("--rows", type=int, default=2048, help="rows of a layer whose reaches are found")
    given = parser.parse_args()
    if given.backward and given.run:
        parser.error("--backward is of drawn gates: leave --run out")
    if given.what == "measure":
        measure(given.lengths or [16_384, 65_536], given.processes or [1, 2, 4], given.backward, given.run)
        return
    samples = own_reaches(given.run, given.text, given.rows) if given.run else drawn_reaches(1 << 20, 32)
    estimate(samples, given.lengths or [1 << 20, 1 << 24], given.processes or [8, 64, 256, 1024])


if __name__ == "__main__":
    main()

"""Resident memory and tokens per second with a long context: the cache in memory, and in mapped files.

    python benchmarks/cache_memory.py --tokens 1048576

Each kind runs in a process of its own. The cache is filled with random keys and values of the model's shape, then
tokens follow one another. The model is not trained: its gates are near 0.5, so rows end after some tens of kept keys.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tra.model import Decoder, DecoderConfig

CONFIG = DecoderConfig(vocabulary=256, layers=4, heads=4, kv_heads=1, width=256, dropout=0.0)
PIECE, NEW = 16_384, 200


def resident_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@torch.inference_mode()
def one_kind(kind: str, tokens: int, folder: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = Decoder(CONFIG).eval()
    caches = model.new_cache() if kind == "memory" else model.new_cache(folder, capacity=tokens + NEW)
    width = CONFIG.width // CONFIG.heads
    before = resident_megabytes()
    for cache in caches:
        for begin in range(0, tokens, PIECE):
            count = min(PIECE, tokens - begin)
            key, value = (torch.randn(1, 1, count, width) for _ in "kv")
            cache.append(torch.nn.functional.rms_norm(key, (width,)), value)
    filled = resident_megabytes() - before
    token = torch.zeros(1, 1, dtype=torch.long)
    times = []
    for _ in range(NEW):
        began = time.process_time()
        token = model(token, cache=caches)[:, -1:].argmax(-1)
        times.append(time.process_time() - began)
    size = sum(tensor.nbytes for cache in caches for tensor in cache.stored) / 1e6
    rate = 1 / sorted(times)[len(times) // 2]
    after = resident_megabytes() - before
    return {"cache MB": size, "filled, resident MB": filled, "at the end": after, "tokens/s": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--kind", choices=["memory", "file"])
    parser.add_argument("--folder", default=None, help="of the mapped files; on a disk")
    given = parser.parse_args()
    if given.kind is not None:
        torch.set_num_threads(1)
        print(json.dumps(one_kind(given.kind, given.tokens, given.folder)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for kind in ("memory", "file"):
            command = [sys.executable, __file__, "--kind", kind, "--tokens", str(given.tokens), "--folder", folder]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            print(f"{kind:>6}: " + ", ".join(f"{name} {number:,.1f}" for name, number in found.items()), flush=True)


if __name__ == "__main__":
    main()

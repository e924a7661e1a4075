"""Runs a function in several processes that share a process group, and returns what each printed."""

import os
import subprocess
import sys
import time
from pathlib import Path


def start(program: str, count: int, folder: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """`program` runs in each process, in which `rank`, `count`, `folder` and `dist` are defined."""
    before = (
        "import sys, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from pathlib import Path\n"
        "rank, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])\n"
        "store = dist.FileStore(str(folder / 'store'), count)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=count, timeout=timedelta(seconds=200))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", before + program, str(rank), str(count), str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(count)
    ]


def finish(processes: list[subprocess.Popen[str]], seconds: float = 300) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    until, found = time.monotonic() + seconds, []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=max(1.0, until - time.monotonic()))
            found.append((process.returncode, out, errors))
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes its pipes
    return found


def run(program: str, count: int, folder: Path, *arguments: str) -> list[str]:
    """What each process printed; all must end well."""
    found = finish(start(program, count, folder, *arguments))
    for rank, (code, _, errors) in enumerate(found):
        assert code == 0, f"rank {rank}: {errors}"
    return [out for _, out, _ in found]

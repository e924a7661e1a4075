"""What the GPU kernel should cost, by arithmetic and a simulation: estimates, none of them measured.

    python benchmarks/gpu_estimate.py            # prints the tables that docs/gpu.md holds between its markers
    python benchmarks/gpu_estimate.py --write    # writes them there

Three steps, each from the one before: how many keys a row visits (simulated with gates like those of a trained language
model), how many clocks a tile of a row block and a key block takes (counted by hand from the kernel's inner loop,
against FlashAttention's), and what that makes of a training step.
"""

import argparse
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- estimates -->", "<!-- end of estimates -->"

KEPT = 0.47
"""Share of keys with a positive score: 42-53% in a trained language model of 4 layers."""
ROWS, KEYS = 64, 32
"""Of a tile."""
FIRST, GROWTH = 128, 4
"""Keys that the first round walks past the diagonal, and how much further each next round goes: those of launch.py."""
PACKED_FROM = 4_096
"""Tokens from which on rows are packed."""
LENGTHS = (1_024, 4_096, 16_384, 65_536, 131_072)


# --- keys visited -----------------------------------------------------------------------------------------------------


def keys_needed(length: int, head_width: int, generator: torch.Generator, tolerance: float = 2.0**-23) -> Tensor:
    """``[length]``: how many keys each row of a head reads until its certified stop, or all that it can see."""
    gate = torch.empty(length, dtype=torch.float64).log_normal_(math.log(0.7), 1.1, generator=generator)
    # Scores of normalised queries and keys lie between 0, the threshold, and sqrt(D): docs/kernel.md.
    odds = math.sqrt(head_width) + math.log(2 / tolerance)
    reach = (math.log1p(math.exp(odds)) / gate).ceil()
    # Of keys kept with probability p, so many are passed over before the reach-th kept one: a negative binomial.
    rate = torch._standard_gamma(reach, generator=generator) * (1 - KEPT) / KEPT
    passed_over = torch.poisson(rate, generator=generator)
    return torch.minimum(reach + passed_over, torch.arange(1, length + 1, dtype=torch.float64)).long()


def in_tiles(keys: Tensor) -> Tensor:
    return (keys + KEYS - 1) // KEYS * KEYS


def block_stop(needed: Tensor, rows: int = ROWS) -> float:
    """Keys visited per row where a block of neighbouring rows goes on until its slowest row is done."""
    needed = needed.view(-1, rows)
    ahead = torch.arange(rows - 1, -1, -1)  # the walk starts at the last row's own key
    return in_tiles((needed + ahead).amax(1)).double().mean().item()


def rounds(length: int) -> list[int]:
    """Keys that each round of forward walks: those of launch.py."""
    walks = [FIRST]
    while walks[-1] * GROWTH < length // 2:
        walks.append(walks[-1] * GROWTH)
    return [*walks, length]


def in_groups(start: Tensor, stop: Tensor, walk: int) -> tuple[int, Tensor]:
    """Slots of tiles for rows that start after one key, stop after another and go no further than a walk; and how far
    each of them came."""
    groups = math.ceil(len(start) / ROWS)
    padding = groups * ROWS - len(start)
    # An empty slot of the last group starts where its last row does and is done at once.
    stop = torch.cat([stop, start[-1:].expand(padding)]).view(groups, ROWS)
    padded = torch.cat([start, start[-1:].expand(padding)]).view(groups, ROWS)
    reached = torch.maximum(padded.amin(1) - walk, stop.amin(1)).clamp(min=-1)
    slots = int(in_tiles(padded.amax(1) - reached).sum()) * ROWS
    return slots, reached.repeat_interleave(ROWS)[: len(start)]


def packed(needed: Tensor) -> tuple[float, float]:
    """Keys visited per row where unfinished rows are packed together after every round: by forward; and by backward,
    which knows the rounds beforehand and has the rows of each in tiles of their own."""
    length = len(needed)
    row = torch.arange(length)
    stop = row - needed  # the first key that a row does not need
    seen, ended = row.clone(), torch.zeros_like(row)
    forward = backward = 0
    for lap, walk in enumerate(rounds(length)):
        going = (seen > stop).nonzero().flatten()
        if not len(going):
            break
        slots, seen[going] = in_groups(seen[going], stop[going], walk)
        forward += slots
        ended[going] = lap
    for lap in ended.unique():
        its = (ended == lap).nonzero().flatten()
        backward += in_groups(row[its], stop[its], length)[0]
    return forward / length, backward / length


class Visited(NamedTuple):
    length: int
    dense: float
    ideal: float
    block_stop: float
    packed: float
    """By forward."""
    regrouped: float
    """By backward."""


@lru_cache
def visited(length: int, head_width: int = 64, tokens: int = 262_144) -> Visited:
    """Averages over as many heads as make up that many rows."""
    generator = torch.Generator().manual_seed(length)
    found = []
    for _ in range(max(4, tokens // length)):
        needed = keys_needed(length, head_width, generator)
        found.append([needed.double().mean().item(), block_stop(needed), *packed(needed)])
    # FlashAttention's causal walk, in tiles.
    return Visited(length, (length + ROWS) / 2, *torch.tensor(found).mean(0).tolist())


# --- clocks of a tile -------------------------------------------------------------------------------------------------


class Gpu(NamedTuple):
    """Rates of one multiprocessor, per clock, from the vendor's white papers."""

    name: str
    mma: int
    """Multiply-adds of bfloat16 in the tensor cores."""
    special: int
    """exp2 and other special functions."""
    lanes: int
    """Single-precision operations in the ordinary lanes."""
    bytes: float
    """Of device memory, for its share of the bandwidth."""
    multiprocessors: int
    gigahertz: float
    block: int
    """Keys of a block: those of tiles.py."""

    @property
    def peak(self) -> float:
        """Floating-point operations per second."""
        return 2e9 * self.mma * self.multiprocessors * self.gigahertz


A100 = Gpu("A100", 1024, 16, 64, 2.04e12 / 108 / 1.41e9, 108, 1.41, 16)
H100 = Gpu("H100", 2048, 16, 128, 3.35e12 / 132 / 1.83e9, 132, 1.83, 32)


class Work(NamedTuple):
    """Of one score, besides the two products."""

    counts: bool
    """Whether the prefix count is a product with a triangle of ones: as many multiply-adds as a block has keys."""
    special: float
    lanes: float
    block: int | None
    """Keys after which the D sums of a row are rescaled, D operations more; None for those of the GPU's tile."""


FLASH = Work(counts=False, special=1, lanes=4, block=64)
"""exp; scale and subtract the maximum (1), running maximum (1), sum (1), convert (1)."""
TRA = Work(counts=True, special=1, lanes=11, block=None)
"""exp; scale (1), compare with the threshold (1), convert the flag (1), add the carried count (1), compare with the
reach (1), gate times count plus score (1), select (1), running maximum (1), subtract it (1), sum (1), convert (1)."""


def clocks(gpu: Gpu, work: Work, head_width: int) -> dict[str, float]:
    """Of a tile, in each kind of unit."""
    scores = ROWS * KEYS
    return {
        "tensor cores": scores * (2 * head_width + gpu.block * work.counts) / gpu.mma,
        "exp": scores * work.special / gpu.special,
        "lanes": scores * (work.lanes + head_width / (work.block or gpu.block)) / gpu.lanes,
    }


def tile_ratio(gpu: Gpu, head_width: int) -> tuple[float, float]:
    """Time of a tile against FlashAttention's, if all units overlap perfectly and if none do."""
    ours, theirs = (clocks(gpu, work, head_width).values() for work in (TRA, FLASH))
    return max(ours) / max(theirs), sum(ours) / sum(theirs)


# --- a training step --------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    name: str
    layers: int
    width: int
    head_width: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Those that are multiplied with every token: 12 width^2 a layer, and the output."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width


MODELS = (
    Model("mini", 4, 256, 64, 50_257),
    Model("medium", 12, 768, 64, 50_257),
    Model("1B", 16, 2_048, 128, 50_257),
)
LINEAR_SHARE, FLASH_SHARE = 0.55, 0.45
"""Of the peak that linear layers and FlashAttention reach in training, taken as assumptions."""
TRAINED_AT = (4_096, 32_768, 131_072)


class Step(NamedTuple):
    """Seconds for a million tokens on one GPU."""

    linear: float
    flash: float
    tra: tuple[float, float]
    """If all units overlap perfectly and if none do."""

    @property
    def ratio(self) -> tuple[float, float]:
        rope = self.linear + self.flash
        return (self.linear + self.tra[0]) / rope, (self.linear + self.tra[1]) / rope


def step(gpu: Gpu, model: Model, dense: float, forward: float, backward: float, tokens: int = 1_000_000) -> Step:
    """With rows that visit so many keys forward and backward, against a dense walk."""
    linear = 6 * model.parameters * tokens / (gpu.peak * LINEAR_SHARE)
    # Two products forward and five backward, over the keys that a row visits.
    per_key = 2 * model.width * model.layers * tokens / (gpu.peak * FLASH_SHARE)
    walked = 2 * forward + 5 * backward
    fast, slow = sorted(per_key * walked * ratio for ratio in tile_ratio(gpu, model.head_width))
    return Step(linear, 7 * per_key * dense, (fast, slow))


# --- launches ---------------------------------------------------------------------------------------------------------

LAUNCH = 4e-6
"""Seconds that a small kernel and its launch take, an assumption."""
LAUNCHED_AT = (*LENGTHS, 2**20)
HEADS = 16


class Launches(NamedTuple):
    """Of one layer over one sequence."""

    forward: int
    backward: int
    scratch: int
    """Bytes of counts and lists in backward."""

    @property
    def seconds(self) -> float:
        return (self.forward + self.backward) * LAUNCH


def launches(length: int, gpu: Gpu, heads: int = HEADS, head_width: int = 64) -> Launches:
    """As launch.py plans them, which needs Triton. A round takes five: compare, prefix sum, fill, place, walk."""
    from tra.ops.threshold_relative.triton import launch

    laps = len(rounds(length)) if length >= PACKED_FROM else 1
    together = max(1, min(heads, launch.SCRATCH // (4 * length * (head_width + 4)))) if laps > 1 else heads
    forward = 4 + math.ceil(heads / together) * (2 + 5 * (laps - 1))
    # Rows of each round are put into tiles of their own.
    places = math.ceil(length / launch.MOST_ROWS + laps - 1) * launch.MOST_ROWS
    plan = launch.plan_backward(heads, places, length, gpu.block, learns=False)
    return Launches(forward, 4 + (4 if laps > 1 else 0) + plan.launches, plan.scratch(False, 32))


class Traffic(NamedTuple):
    """Bytes that programs read and write in one layer over one sequence, most of them in the cache of the GPU."""

    forward: float
    backward: float


def traffic(keys: Visited, length: int, gpu: Gpu, heads: int = HEADS, head_width: int = 64) -> Traffic:
    """Of rows that visit so many keys, in bfloat16. Queries, outputs and gradients of rows are read or written once."""
    row = 4 * head_width  # bytes of a key and its value, or of a query and its gradient
    walked, again = (keys.packed, keys.regrouped) if length >= PACKED_FROM else (keys.block_stop, keys.block_stop)
    forward = walked / ROWS * row + row
    # The gradients of queries read keys for a tile of rows, those of keys read rows and their counts for a key block.
    backward = again * (row / ROWS + row / gpu.block + (4 + 4) / gpu.block) + 3 * row
    return Traffic(forward * length * heads, backward * length * heads)


# --- tables -----------------------------------------------------------------------------------------------------------


def tables() -> Iterator[str]:
    yield "Keys visited per row and head (D = 64, default tolerance; simulated):"
    yield ""
    yield "| tokens | dense | rows' own reach | block stop | packed, forward | regrouped, backward | dense / packed |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for length in LENGTHS:
        keys = visited(length)
        cells = (keys.dense, keys.ideal, keys.block_stop, keys.packed, keys.regrouped)
        yield f"| {length:,} | " + " | ".join(f"{x:,.0f}" for x in cells) + f" | {keys.dense / keys.packed:.1f} |"
    yield ""
    yield f"Clocks of one multiprocessor for a tile of {ROWS} rows and {KEYS} keys, forward, bfloat16 (arithmetic):"
    yield ""
    yield "| GPU | D | unit | FlashAttention | TRA |"
    yield "|---|---:|---|---:|---:|"
    for gpu in (A100, H100):
        for head_width in (64, 128):
            theirs, ours = (clocks(gpu, work, head_width) for work in (FLASH, TRA))
            for unit in ours:
                yield f"| {gpu.name} | {head_width} | {unit} | {theirs[unit]:.0f} | {ours[unit]:.0f} |"
            overlap, none = tile_ratio(gpu, head_width)
            ratio = f"**{overlap:.2f}** if all overlap, **{none:.2f}** if none"
            yield f"| {gpu.name} | {head_width} | **ratio** | 1 | {ratio} |"
    yield ""
    yield (
        f"Launches of a layer of {HEADS} heads of width 64 over one sequence, their time at 4 microseconds each, and"
        " the traffic of their programs on an A100 (arithmetic):"
    )
    yield ""
    yield "| tokens | launches, forward | backward | time | counts and lists | traffic, forward | backward |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for length in LAUNCHED_AT:
        found, moved = launches(length, A100), traffic(visited(min(length, LENGTHS[-1])), length, A100)
        cells = (
            *(f"{number:,}" for number in (length, found.forward, found.backward)),
            *(f"{1e3 * found.seconds:.1f} ms", f"{found.scratch / 2**20:,.0f} MiB"),
            *(f"{number / 1e9:.3g} GB" for number in moved),
        )
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield "A training step against RoPE on FlashAttention, one GPU, bfloat16 (estimated):"
    yield ""
    yield (
        "| GPU | model | tokens | linear layers | attention, RoPE | attention, TRA | step, TRA / RoPE |"
        " the same, block stop only |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for gpu in (A100, H100):
        for model in MODELS:
            for length in TRAINED_AT:
                keys = visited(length, model.head_width)
                built = step(gpu, model, keys.dense, keys.packed, keys.regrouped)
                before = step(gpu, model, keys.dense, keys.block_stop, keys.block_stop)
                tra, now, then = (f"{low:.2f}-{high:.2f}" for low, high in (built.tra, built.ratio, before.ratio))
                yield (
                    f"| {gpu.name} | {model.name} | {length:,} | {built.linear:.2f} s | {built.flash:.2f} s | {tra} s"
                    f" | {now} | {then} |"
                )
    yield ""
    yield "Seconds are for a million tokens."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    written = "\n".join(tables())
    if not parser.parse_args().write:
        print(written)
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{written}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

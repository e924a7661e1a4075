"""`make gpu-check`: every Triton kernel compiled for every GPU that is promised, on a machine that has none.

What is launched is what is compiled: the launches of a small call are recorded and their arguments taken as they are.
Checked are registers, stack, shared memory and occupancy against ceilings.json, the product instruction of the scores,
and that the inner loops copy asynchronously. Results are kept under build/ by a digest of sources and arguments.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.triton import kernels, launch, tiles

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build" / "gpu-check"
CEILINGS = Path(__file__).with_name("ceilings.json")
DOCUMENT = ROOT / "docs" / "gpu.md"
BEGIN, END = f"<!-- compiled with Triton {triton.__version__} -->", "<!-- end of what was compiled -->"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Processor:
    family: str
    instruction: str
    """Of the scores up to a width of 128, with {keys} for the keys of a block."""
    shared: int
    """Bytes of shared memory per multiprocessor."""
    warps: int
    """That a multiprocessor holds at most."""


OF_A_WARP = "mma.sync.aligned.m16n8k16"
PROCESSORS = {
    "sm_80": Processor("warp", OF_A_WARP, 164 << 10, 64),
    "sm_86": Processor("warp", OF_A_WARP, 100 << 10, 48),
    "sm_89": Processor("warp", OF_A_WARP, 100 << 10, 48),
    "sm_90": Processor("hopper", "wgmma.mma_async.sync.aligned.m64n{keys}k16", 228 << 10, 64),
    "sm_100": Processor("blackwell", "tcgen05.mma", 228 << 10, 64),
    "sm_120": Processor("warp", OF_A_WARP, 100 << 10, 48),
    "gfx942": Processor("mfma", "v_mfma_f32_", 64 << 10, 32),
}


@dataclass(frozen=True)
class Launch:
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, int]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[self.kernel.arg_names.index(name)]


@dataclass(frozen=True)
class Compiled:
    target: str
    kernel: str
    dtype: str
    width: int
    variant: str
    tile: str
    registers: int
    stack: int
    """Bytes per thread; for AMD registers that were spilled."""
    shared: int
    occupancy: float
    """Warps that a multiprocessor holds of those it could."""
    scores: bool
    """Whether the scores' instruction is there."""
    copies: int
    """Asynchronous copies."""

    @property
    def name(self) -> str:
        return f"{self.target} {self.kernel} {self.dtype} {self.width} {self.variant}".strip()


MOST_CHOICES = 3
"""Tiles that a kernel has to choose from."""
WALKING = ("forward", "decode_part", "backward_query", "backward_key")
"""The others take no time that counts."""
LAUNCHED = (*WALKING, "join_parts", "pack_rows", "look_at_rows", "list_visitors")


class Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*arguments: Any, **options: int) -> None:
            self.launches.append(Launch(self.kernel, arguments, options))

        return record


def launches(family: str, dtype: torch.dtype, width: int, everything: bool = False, choice: int = 0) -> list[Launch]:
    """What forward and backward launch, packed and not, and decoding; with everything: masks, segments and dropout.

    With the tiles of that number among those to choose from, or the last.
    """
    found: list[Launch] = []
    choices = tiles.choices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "family", lambda device: family)
        patch.setattr(tiles, "choices", lambda *kind: choices(*kind)[: choice + 1][-1:])
        for name in LAUNCHED:
            patch.setattr(kernels, name, Recorder(getattr(kernels, name), found))
        length = 256
        query, key, value = torch.ones(3, 1, 4, length, width, dtype=dtype).unbind(0)
        mask = torch.ones(1, length, dtype=torch.bool) if everything else None
        segments = torch.zeros(1, length, dtype=torch.int64) if everything else None
        seed = torch.ones(1, dtype=torch.int64) if everything else None
        inputs = Inputs(query, key[:, :2], value[:, :2], -torch.ones(1, 4, length), mask, segments, seed, None, None)
        options = Options(width**-0.5, 0.0, 0.0, 0.1 if everything else 0.0, 1e-7, width**0.5)
        for packed_from in (length, 2 * length):
            patch.setattr(launch, "PACKED_FROM", packed_from)
            result = launch.forward(inputs, options, True)
            launch.backward(result.out, inputs, result, options)
        long = torch.ones(1, 2, 4096, width, dtype=dtype)
        masks = (None if x is None else x.expand(1, 16, length).reshape(1, 4096) for x in (mask, segments))
        decoding = Inputs(query[:, :, :1], long, long, -torch.ones(1, 4, 1), *masks, seed, None, None)
        launch.forward(decoding, options, False)
    return found


def described(launched: Launch) -> list[str]:
    """What a kernel does besides its plain walk, and how many stages it has if not two."""
    given = dict(zip(launched.kernel.arg_names, launched.arguments, strict=True))
    words = {
        "decoding": given.get("DECODES"),
        "packed": given.get("RESUMES"),
        "packing": given.get("PACKS") and not given["RESUMES"],
        "careful": given.get("CAREFUL") and not given.get("DECODES"),
        "masks and dropout": given.get("DROPOUT"),
        "again": given.get("ENDS"),
        f"{launched.options.get('num_stages', 2)} stages": launched.options.get("num_stages", 2) != 2,
    }
    return [word for word, holds in words.items() if holds]


def compile_launch(launched: Launch, target: str, dtype: str, width: int, variant: str) -> Compiled:
    signature, constants, attributes = _signature(launched)
    processor, keys = PROCESSORS[target], launched["N"] if "N" in launched.kernel.arg_names else 0
    what = (launched.kernel.cache_key, target, signature, constants, attributes, launched.options)
    digest = hashlib.sha256(repr((triton.__version__, *what)).encode()).hexdigest()
    stored = CACHE / f"{digest}.json"
    if stored.exists():
        # Some kernels are the same for every dtype.
        return replace(Compiled(**json.loads(stored.read_text())), dtype=dtype, width=width, variant=variant)
    place = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    source = ASTSource(launched.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=place, options=launched.options)
    warps = launched.options.get("num_warps", 4)
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers, stack = _number(r"\.vgpr_count:\s*(\d+)", text), _number(r"\.vgpr_spill_count:\s*(\d+)", text)
        copies = 0
    else:
        text = compiled.asm["ptx"]
        registers, stack = _usage(compiled.asm["cubin"])
        copies = len(re.findall(r"cp\.async\.c[ag]", text))
    result = Compiled(
        *(target, launched.kernel.__name__, dtype, width, variant),
        "x".join(str(launched[name]) for name in ("M", "N") if name in launched.kernel.arg_names) + f", {warps} warps",
        *(registers, stack, compiled.metadata.shared),
        _occupancy(processor, target, registers, compiled.metadata.shared, warps),
        *(_instruction(target, width).format(keys=keys) in text, copies),
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(asdict(result)))
    return result


def _instruction(target: str, width: int) -> str:
    wide = width > 128 and not target.startswith("gfx")
    return OF_A_WARP if wide else PROCESSORS[target].instruction


def _signature(launched: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """As Triton's launcher specialises arguments: constants, ones and multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, (parameter, value) in enumerate(zip(launched.kernel.params, launched.arguments, strict=True)):
        name = parameter.name
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return signature, constants, attributes


def _usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])


def _occupancy(processor: Processor, target: str, registers: int, shared: int, warps: int) -> float:
    by_memory = processor.shared // max(shared + 1024, 1)
    if target.startswith("gfx"):  # four units of 512 registers per lane, eight waves each
        by_registers = 4 * min(8, 512 // max(8, -(-registers // 8) * 8)) // warps
    else:
        by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    return round(min(by_memory, by_registers, processor.warps // warps) * warps / processor.warps, 3)


def wanted(fast: bool) -> Iterator[tuple[str, str, int, str]]:
    """(target, dtype, width, variant)."""
    for target in ("sm_80", "sm_90") if fast else PROCESSORS:
        yield target, "bfloat16", 64, ""
        if fast:
            continue
        yield target, "bfloat16", 128, ""
        yield target, "bfloat16", 256, ""
        yield target, "float16", 64, ""
        yield target, "float32", 64, ""
        yield target, "float32", 128, ""
        yield target, "bfloat16", 64, "careful"
        yield target, "bfloat16", 64, "masks and dropout"


def compile_all(fast: bool, only: str = "") -> Iterator[Compiled]:
    seen: set[tuple[Any, ...]] = set()
    for target, dtype, width, variant in wanted(fast):
        if only not in target:
            continue
        family = PROCESSORS[target].family
        everything = variant == "masks and dropout"
        for choice in range(MOST_CHOICES):
            for launched in launches(family, getattr(torch, dtype), width, everything, choice):
                walks, words = launched.kernel.__name__ in WALKING, described(launched)
                name = (launched.kernel.__name__, target, dtype, width, *words)
                elsewhere = ("careful" in words) != (variant == "careful") if walks else (width != 64 or variant)
                if elsewhere or name in seen:
                    continue
                seen.add(name)
                yield compile_launch(launched, target, dtype, width, ", ".join(words))


def complaints(results: list[Compiled], ceilings: dict[str, dict[str, float]] | None) -> list[str]:
    """What is worse than the ceilings say it may be, if there are any, and what is not as it must be."""
    found = []
    for result in results:
        if ceilings is not None and result.name not in ceilings:
            found.append(f"{result.name}: no ceiling is stored; make gpu-check WRITE=--write")
            continue
        ceiling = asdict(result) if ceilings is None else ceilings[result.name]
        for field in ("registers", "stack", "shared"):
            if getattr(result, field) > ceiling[field]:
                found.append(f"{result.name}: {field} {getattr(result, field)} > {ceiling[field]}")
        if result.occupancy < ceiling["occupancy"]:
            found.append(f"{result.name}: occupancy {result.occupancy} < {ceiling['occupancy']}")
        if result.kernel not in WALKING or result.dtype == "float32":
            continue
        if not result.scores:
            found.append(f"{result.name}: the scores' instruction is not {_instruction(result.target, result.width)}")
        if result.copies == 0 and not result.target.startswith("gfx"):
            found.append(f"{result.name}: no asynchronous copies")
    return found


def table(results: list[Compiled]) -> str:
    """Markdown, a line for each kernel, width and dtype, processors side by side. Variants are not shown."""
    results = [x for x in results if x.variant in ("", "decoding", "packing", "packed") and x.dtype != "float16"]
    targets = list(dict.fromkeys(result.target for result in results))
    lines = [
        f"Triton {triton.__version__}. Registers per thread, bytes of stack (AMD: spilled registers), KiB of shared"
        " memory, occupancy; rows x keys of a tile, and warps.",
        "",
        "| kernel | dtype, width | " + " | ".join(targets) + " |",
        "|---|---|" + "---|" * len(targets),
    ]

    def row(result: Compiled) -> tuple[str, str, int, str]:
        return result.variant, result.dtype, result.width, result.kernel

    for (variant, dtype, width, kernel), group in groupby(sorted(results, key=row), key=row):
        cells = {
            x.target: f"{x.registers}, {x.stack}, {x.shared / 1024:.0f}, {x.occupancy:.0%} ({x.tile})" for x in group
        }
        name = kernel + (f", {variant}" if variant else "")
        lines.append(f"| {name} | {dtype}, {width} | " + " | ".join(cells.get(t, "") for t in targets) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="two processors, one width")
    parser.add_argument("--only", default="", help="part of a processor's name")
    parser.add_argument("--write", action="store_true", help="store what is found as ceilings, and the table in docs")
    options = parser.parse_args(arguments)
    results = []
    for result in compile_all(options.fast, options.only):
        results.append(result)
        print(
            f"{result.name:<55} {result.tile:<16} registers {result.registers:>3}  stack {result.stack:>4}  "
            f"shared {result.shared:>6}  occupancy {result.occupancy:.0%}  copies {result.copies}",
            flush=True,
        )
    ceilings = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    if options.write:
        fields = ("registers", "stack", "shared", "occupancy")
        fresh = {result.name: {field: getattr(result, field) for field in fields} for result in results}
        stored = ceilings.get(triton.__version__, {})
        if not options.fast:  # nothing is left of kernels that are no more
            compiled = {result.target for result in results}
            stored = {name: ceiling for name, ceiling in stored.items() if name.split()[0] not in compiled}
        ceilings[triton.__version__] = stored | fresh
        CEILINGS.write_text(json.dumps(ceilings, indent=1, sort_keys=True) + "\n")
        before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
        if begin and not options.fast and not options.only:  # of the version that docs show
            after = rest.partition(END)[2]
            DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")
    found = complaints(results, ceilings.get(triton.__version__, {}))
    print(
        "\n".join(found) or f"{len(results)} kernels compiled with Triton {triton.__version__}, all as they should be"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

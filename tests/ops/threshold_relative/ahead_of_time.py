"""`make gpu-check`: every Triton kernel compiled for every GPU that is promised, on a machine that has none.

What is launched is what is compiled: the launches of a small call are recorded and their arguments taken as they are.
Checked are shared memory and registers against what the processor has, stack use against the exceptions in
ceilings.json, the product instruction of the scores, and that the inner loops copy asynchronously. Results are kept
under build/ by a digest of sources and arguments.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import ASTSource, make_backend

from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.pieces import Piece, Rows
from tra.ops.threshold_relative.triton import kernels, launch, tiles
from tra.ops.threshold_relative.triton.pieces import BackwardRows, ForwardRows

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build" / "gpu-check"
CEILINGS = Path(__file__).with_name("ceilings.json")
DOCUMENT = ROOT / "docs" / "gpu.md"
BEGIN, END = f"<!-- compiled with Triton {triton.__version__} -->", "<!-- end of what was compiled -->"
triton.knobs.compilation.disable_line_info = True  # a quarter of the time, and no instruction
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
    """Of the scores up to a width of 128, with {keys} for the keys of a block and {type} for their dtype."""
    limit: int
    """Bytes of shared memory that a program can have."""
    shared: int
    """Bytes of shared memory per multiprocessor."""
    warps: int
    """That a multiprocessor holds at most."""


OF_A_WARP = "mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32"
"""With its dtype: the count of kept keys is a product of float16."""
PROCESSORS = {
    "sm_80": Processor("warp", OF_A_WARP, 163 << 10, 164 << 10, 64),
    "sm_86": Processor("warp", OF_A_WARP, 99 << 10, 100 << 10, 48),
    "sm_89": Processor("warp", OF_A_WARP, 99 << 10, 100 << 10, 48),
    "sm_90": Processor(
        "hopper", "wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{type}.{type}", 227 << 10, 228 << 10, 64
    ),
    "sm_100": Processor("blackwell", "tcgen05.mma", 227 << 10, 228 << 10, 64),
    "sm_120": Processor("warp", OF_A_WARP, 99 << 10, 100 << 10, 48),
    "gfx942": Processor("mfma", "v_mfma_f32_{shape}_{type}", 64 << 10, 64 << 10, 32),
}
NAMES = {"bfloat16": "bf16", "float16": "f16"}
TWINS = {"sm_89": "sm_86"}
"""Processors for which Triton writes the text that it writes for another, up to the name: only the assembler is run for
them. That the texts are the same is checked wherever COMPARED holds. (sm_80 has another text in Triton 3.9.0.)"""
COMPARED = ("bfloat16", 64)
"""Dtype and width, of every kernel."""


@dataclass(frozen=True)
class Launch:
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


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
WALKING = ("forward", "decode_part", "join_parts", "backward_query", "backward_key", "resume_query", "piece_key")
"""The others take no time that counts."""
WIDEST_OF_A_TILE = (("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 128), ("float32", 256))
SIMPLER = (("float32", 64), ("float16", 64))
"""Dtypes and widths that need no more than others: float32 has the tiles of width 128, float16 those of bfloat16 and
its instructions under another name. They are compiled for a processor of each maker."""
SIMPLER_ON = ("sm_86", "gfx942")
PIECES = ("resume_query", "piece_key")
LARGE = ("backward_query", "backward_key")
"""They have the most in shared memory."""


class Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(**given: Any) -> None:
            arguments = {name: given.pop(name) for name in self.kernel.arg_names}
            self.launches.append(Launch(self.kernel, arguments, given))

        return record

    @property
    def arg_names(self) -> list[str]:
        return self.kernel.arg_names


@contextmanager
def recorded(family: str) -> Iterator[list[Launch]]:
    """Within it kernels are not launched but listed, as on a processor of that family."""
    found: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "family", lambda device: family)
        for name in kernels.__all__:
            patch.setattr(kernels, name, Recorder(getattr(kernels, name), found))
        yield found


def launches(family: str, dtype: torch.dtype, width: int, everything: bool = False, choice: int = 0) -> list[Launch]:
    """What forward and backward launch, packed and not, and decoding; with everything: masks, segments, dropout,
    lengths on the device, and a threshold for each row through which gradients pass.

    With the tiles of that number among those to choose from, or the last.
    """
    choices = tiles.choices
    with recorded(family) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "choices", lambda *kind: choices(*kind)[: choice + 1][-1:])
        length, long = 256, 4096
        query, key, value = torch.ones(3, 1, 4, length, width, dtype=dtype).unbind(0)

        def inputs(query: Tensor, key: Tensor, value: Tensor) -> Inputs:
            rows, keys = query.shape[:3], key.shape[2]
            optional: list[Any] = [None] * 6
            if everything:
                mask, segments = torch.ones(1, keys, dtype=torch.bool), torch.zeros(1, keys, dtype=torch.int64)
                seed, lengths = torch.ones(1, dtype=torch.int64), torch.full((1,), keys)
                optional = [mask, segments, seed, torch.zeros(rows), None, lengths]
            return Inputs(query, key, value, -torch.ones(rows), *optional)

        bound = None if everything else width**0.5
        options = Options(width**-0.5, 0.0, 0.5 * everything, 0.1 * everything, 1e-7, bound)
        given = inputs(query, key[:, :2], value[:, :2])
        for packed_from, stretches in ((length, 1024), (2 * length, 1024), (2 * length, 4)):
            patch.setattr(launch, "PACKED_FROM", packed_from)
            patch.setattr(launch, "MOST_STRETCHES", stretches)
            result = launch.forward(given, options, training=True)
            launch.backward(result.out, given, result, options)
        cache = torch.ones(1, 2, long, width, dtype=dtype)
        launch.forward(inputs(query[:, :, :1], cache, cache), options, training=False)
    return found


def launches_in_pieces(family: str, dtype: torch.dtype, width: int, everything: bool = False) -> list[Launch]:
    """What one piece of the keys launches, forward and backward, with masks; with everything: documents, and a
    threshold for each row through which gradients pass. Dropout is refused."""
    with recorded(family) as found:
        length = 256
        query, key, value = torch.ones(3, 1, 4, length, width, dtype=dtype).unbind(0)
        limits = torch.zeros(query.shape[:3]) if everything else None
        inputs = Inputs(query, key[:, :2], value[:, :2], -torch.ones(query.shape[:3]), None, None, None, limits, None)
        options = Options(width**-0.5, 0.0, 0.5 * everything, 0.0, 1e-7, width**0.5)
        documents = torch.zeros(1, length, dtype=torch.int32) if everything else None
        rows = Rows(inputs, options, 0, length, segments=documents, starts=documents)
        piece = Piece(inputs.key, inputs.value, 0, segment_ids=documents)
        forward = ForwardRows(rows, training=True)
        forward.visit(piece)
        BackwardRows(rows, forward.result(), forward.out).visit(piece)
    return [x for x in found if x.kernel.__name__ in ("forward", "resume_query", "piece_key")]


def described(launched: Launch) -> list[str]:
    """What a kernel does besides its plain walk, and how many stages it has if not two."""
    given = launched.arguments
    # Forward packs in its first rounds; between pieces every round does, and always with a mask.
    piece = launched.kernel.__name__ in PIECES or (given.get("RESUMES") and given["HAS_MASK"] and not given["DROPOUT"])
    words = {
        "pieces": piece,
        "decoding": given.get("DECODES"),
        "packed": given.get("RESUMES") and not piece,
        "packing": given.get("PACKS") and not given["RESUMES"],
        "careful": given.get("CAREFUL") and not given.get("DECODES"),
        "everything": given.get("DROPOUT") or (piece and given["LEARNS"]),
        "stretches": given.get("SEVERAL") and "ADDS" in given,
        f"{launched.options.get('num_stages', 2)} stages": launched.options.get("num_stages", 2) != 2,
    }
    return [word for word, holds in words.items() if holds]


def compile_launch(launched: Launch, target: str, dtype: str, width: int, variant: str) -> Compiled:
    signature, constants, attributes = signature_of(launched)
    processor, keys = PROCESSORS[target], launched.arguments.get("N", 0)
    stored = digest_of(launched, target)
    if stored.exists():
        # Some kernels are the same for every dtype.
        known = Compiled(**json.loads(stored.read_text()))
        warps = launched.options.get("num_warps", 4)
        occupancy = _occupancy(processor, target, known.registers, known.shared, warps)
        return replace(known, dtype=dtype, width=width, variant=variant, occupancy=occupancy)
    place = gpu_target(target)
    source = ASTSource(launched.kernel, signature, constants, attributes)
    warps = launched.options.get("num_warps", 4)
    twin = TWINS.get(target)
    if twin is not None:
        first = compile_launch(launched, twin, dtype, width, variant)
        text = digest_of(launched, twin).with_suffix(".ptx").read_text().replace(f".target {twin}", f".target {target}")
        if (dtype, width) == COMPARED and "everything" not in variant:
            own = triton.compile(source, target=place, options=launched.options).asm["ptx"]
            assert own == text, f"{first.name} has another text for {target}: take it out of TWINS"
        registers, stack = _usage(assemble(text, place, launched.options))
        shared, copies = first.shared, first.copies
    else:
        compiled = triton.compile(source, target=place, options=launched.options)
        shared = compiled.metadata.shared
        if place.backend == "hip":
            text, copies = compiled.asm["amdgcn"], 0
            registers, stack = _number(r"\.vgpr_count:\s*(\d+)", text), _number(r"\.vgpr_spill_count:\s*(\d+)", text)
        else:
            text = compiled.asm["ptx"]
            registers, stack = _usage(compiled.asm["cubin"])
            copies = len(re.findall(r"cp\.async\.c[ag]", text))
        if target in TWINS.values():
            CACHE.mkdir(parents=True, exist_ok=True)
            stored.with_suffix(".ptx").write_text(text)
    result = Compiled(
        *(target, launched.kernel.__name__, dtype, width, variant),
        "x".join(str(launched.arguments[name]) for name in ("M", "N") if name in launched.arguments)
        + f", {warps} warps",
        *(registers, stack, shared),
        _occupancy(processor, target, registers, shared, warps),
        *(has_instruction(text, target, dtype, width, keys), copies),
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(asdict(result)))
    return result


def digest_of(launched: Launch, target: str) -> Path:
    """Where the result is kept."""
    what = (launched.kernel.cache_key, target, *signature_of(launched), launched.options)
    digest = hashlib.sha256(repr((triton.__version__, *what)).encode()).hexdigest()
    return CACHE / f"{digest}.json"


def gpu_target(target: str) -> GPUTarget:
    return GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)


def assemble(text: str, place: GPUTarget, options: dict[str, int]) -> bytes:
    """What Triton's last stage makes of a text."""
    backend, stages = make_backend(place), {}
    backend.add_stages(stages, backend.parse_options(options), Language.TRITON)
    return stages["cubin"](text, {})


def instruction(target: str, dtype: str, width: int, keys: int) -> str:
    """A pattern of the scores' product in the assembler's text.

    In float16 the count has the same one: there the check says less, and the kernels are those of bfloat16.
    """
    wide = width > 128 and not target.startswith("gfx")
    text = re.escape(OF_A_WARP if wide else PROCESSORS[target].instruction)
    shapes = {r"\{keys\}": str(keys), r"\{type\}": NAMES.get(dtype, ""), r"\{shape\}": r"\d+x\d+x\d+"}
    for name, value in shapes.items():
        text = text.replace(name, value)
    return text


def has_instruction(text: str, target: str, dtype: str, width: int, keys: int) -> bool:
    return dtype == "float32" or re.search(instruction(target, dtype, width, keys), text) is not None


def signature_of(launched: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """As Triton's launcher specialises arguments: constants, ones and multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, parameter in enumerate(launched.kernel.params):
        name, value = parameter.name, launched.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and special):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and special:
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
    reserved = 0 if target.startswith("gfx") else 1024  # bytes that CUDA takes of each program's
    by_memory = processor.shared // max(shared + reserved, 1)
    if target.startswith("gfx"):  # four units of 512 registers per lane, eight waves each
        by_registers = 4 * min(8, 512 // max(8, -(-registers // 8) * 8)) // warps
    else:
        by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    return round(min(by_memory, by_registers, processor.warps // warps) * warps / processor.warps, 3)


def wanted(fast: bool) -> Iterator[tuple[str, str, int, str]]:
    """(target, dtype, width, variant)."""
    if fast:
        yield from (("sm_80", "bfloat16", 64, ""), ("sm_90", "bfloat16", 64, ""), ("sm_86", "float32", 256, ""))
        return
    for target in PROCESSORS:
        for dtype, width in (*WIDEST_OF_A_TILE, *(SIMPLER if target in SIMPLER_ON else ())):
            for variant in ("",) if dtype == "float16" else ("", "everything"):
                yield target, dtype, width, variant
        yield target, "bfloat16", 64, "careful"
        for dtype, width in (("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 256)):
            yield target, dtype, width, "pieces"
        yield target, "bfloat16", 64, "pieces everything"


def compile_all(fast: bool, only: str = "") -> Iterator[Compiled]:
    """Those whose processor, dtype, width and variant begin with the words of `only`, each with any word for *."""
    seen: set[tuple[Any, ...]] = set()
    for target, dtype, width, variant in wanted(fast):
        given = (target, dtype, str(width), variant)
        if any(word not in ("*", mine) for word, mine in zip(only.split(), given, strict=False)):
            continue
        family = PROCESSORS[target].family
        everything = "everything" in variant
        for choice in range(1 if fast or "pieces" in variant else MOST_CHOICES):
            record = launches_in_pieces if "pieces" in variant else partial(launches, choice=choice)
            for launched in record(family, getattr(torch, dtype), width, everything):
                walks, words = launched.kernel.__name__ in WALKING, described(launched)
                name = (launched.kernel.__name__, target, dtype, width, *words)
                if fast and dtype == "float32" and launched.kernel.__name__ not in LARGE:
                    continue
                elsewhere = ("careful" in words) != (variant == "careful") if walks else variant == "careful"
                elsewhere &= "pieces" not in variant  # both are launched for each piece, and compiled where plain is
                elsewhere |= "pieces" in variant and "careful" in words and (dtype, width) != COMPARED
                if elsewhere or name in seen:
                    continue
                seen.add(name)
                yield compile_launch(launched, target, dtype, width, ", ".join(words))


def complaints(results: list[Compiled], stack: dict[str, int]) -> list[str]:
    """What is not as it must be; `stack` has patterns of the kernels that may use some, and how many bytes."""
    found = []
    for result in results:
        limit = PROCESSORS[result.target].limit
        allowed = max((size for pattern, size in stack.items() if fnmatch(result.name, pattern)), default=0)
        if result.shared > limit:
            found.append(f"{result.name}: {result.shared} bytes of shared memory, the processor has {limit}")
        if result.occupancy == 0:
            found.append(
                f"{result.name}: {result.registers} registers in {result.tile} are more than the processor has"
            )
        if result.stack > allowed:
            found.append(f"{result.name}: {result.stack} bytes of stack, {allowed} are allowed")
        if result.kernel not in WALKING or result.dtype == "float32":
            continue
        if not result.scores:
            found.append(f"{result.name}: the instruction of the scores is missing")
        if result.copies == 0 and result.target.startswith("sm") and "stretches" not in result.variant:
            found.append(f"{result.name}: no asynchronous copies")
    return found


def table(results: list[Compiled]) -> str:
    """Markdown, a line for each kernel, width and dtype, processors side by side. Variants are not shown."""
    shown = ("", "decoding", "packed", "everything", "pieces")
    results = [x for x in results if x.variant in shown and x.kernel in WALKING and x.dtype != "float16"]
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
    parser.add_argument("--fast", action="store_true", help="what `make test` compiles: three processors, one tile")
    parser.add_argument("--only", default="", help="processor, dtype, width and variant, or * for any of them")
    parser.add_argument("--write", action="store_true", help="put the table into docs")
    options = parser.parse_args(arguments)
    results = []
    for result in compile_all(options.fast, options.only):
        results.append(result)
        print(
            f"{result.name:<60} {result.tile:<16} registers {result.registers:>3}  stack {result.stack:>4}  "
            f"shared {result.shared:>6}  occupancy {result.occupancy:.0%}  copies {result.copies}",
            flush=True,
        )
    if options.write:
        before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        if begin:  # of the version that docs show
            DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")
    found = complaints(results, json.loads(CEILINGS.read_text()))
    print(
        "\n".join(found) or f"{len(results)} kernels compiled with Triton {triton.__version__}, all as they should be"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

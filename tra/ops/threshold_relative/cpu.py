"""The native CPU kernel: `op.cpp` and `cpu.cpp`, built once per instruction set, each build a library of operators."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tra.lookup import lookup
from tra.ops.threshold_relative.call import Gradients, Inputs, Options, Result
from tra.ops.threshold_relative.registration import Operators, PieceOperators, define, define_pieces

RESIDUAL = (torch.bfloat16, torch.float16)
TYPES = (torch.float32, *RESIDUAL)
LONGEST = 2**24
"""Keys are counted in float32."""
WIDEST = 256
"""kWidest of plan.h."""
VARIANTS = ("generic", "avx2", "avx512")
"""From the plainest instruction set to the richest."""

NOT_BUILT = (
    "is not built: with torch installed and a C++ compiler (gcc or clang) at hand, "
    "reinstall threshold-relative-attention"
)
OTHER_SOURCES = "was built from other sources than this package's: reinstall threshold-relative-attention"


def about() -> str:
    if unusable is not None:
        return f"native kernel; not usable here: it {unusable}"
    return (
        f"native kernel, {variant}; refuses other devices than the CPU, float64, "
        f"widths over {WIDEST}, more than {LONGEST:,} keys"
    )


def refusal(inputs: Inputs, options: Options) -> str | None:
    query, value = inputs.query, inputs.value
    if query.device.type not in ("cpu", "meta"):
        return f"needs tensors on the CPU, got {query.device}"
    if query.dtype not in TYPES:
        return f"computes in float32, bfloat16 and float16, got {query.dtype}"
    if unusable is not None:
        return unusable
    if query.shape[3] > WIDEST or value.shape[3] > WIDEST:
        return f"takes widths up to {WIDEST}, got {query.shape[3]} and {value.shape[3]}"
    if value.shape[2] > LONGEST:
        return f"takes up to {LONGEST} keys, got {value.shape[2]}"
    return None


def passed_over(reason: str) -> str | None:
    return f"runs many times slower without its native CPU kernel, which {reason}" if reason == unusable else None


@contextmanager
def using(name: str) -> Iterator[None]:
    """Compute with that variant meanwhile, of those that are built and run here: to compare them."""
    global variant
    if unusable is not None:
        raise ValueError(f"variant must be left out where the native kernel {unusable}; got {name!r}")
    lookup(LIBRARIES, name, "variant")
    before, variant = variant, name
    try:
        yield
    finally:
        variant = before


def operators() -> Operators:
    """Those of the variant in use."""
    assert variant is not None
    return LIBRARIES[variant]


def piece_operators() -> PieceOperators:
    """Those of the variant in use."""
    assert variant is not None
    return PIECES[variant]


def forward(inputs: Inputs, options: Options, training: bool) -> Result:
    try:
        out, row_state, residual = operators().forward(*inputs, *options, training)
    except RuntimeError as error:
        raise as_python_error(error) from None
    return Result(out, row_state, residual if residual.dim() == 4 else None)


def backward(grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients:
    residual = result.out.new_empty(0) if result.residual is None else result.residual
    saved = (result.out, result.row_state, residual)
    query, key, value, log_gate, through = operators().backward(grad_out, *saved, True, True, True, *inputs, *options)
    return Gradients(query, key, value, log_gate, through if through.dim() == 3 else None)


def as_python_error(error: RuntimeError) -> Exception:
    """What the kernel found wrong with its data, as Python calls it: through PyTorch's ABI all are RuntimeErrors."""
    text = str(error).partition("\n")[0]
    for name in ("log_gate", "score_bound", "key_lengths"):
        if f"{name} must" in text:
            return ValueError(text[text.index(f"{name} must") :])
    return MemoryError(text) if "ran out of memory" in text else error


def _load(folder: Path) -> tuple[dict[str, Operators], str | None]:
    """The operators of the variants that were built there and that this processor runs; or none, and why."""
    richest = {"AVX512": 3, "AVX2": 2}.get(torch.backends.cpu.get_cpu_capability(), 1)
    found = {}
    for name in VARIANTS[:richest]:
        file = folder / f"_kernel_{name}.so"
        if not file.exists():
            continue
        try:
            torch.ops.load_library(file)
        except OSError as error:
            return {}, f"cannot be loaded ({error}): reinstall threshold-relative-attention"
        found[name], PIECES[name] = define(name, lambda: RESIDUAL), define_pieces(name)
        if not _answers(found[name], PIECES[name]):
            return {}, OTHER_SOURCES
    return found, None if found else NOT_BUILT


def _answers(found: Operators, pieces: PieceOperators) -> bool:
    """Whether a library has the kernels, and kernels of this package's schemas."""
    one, gate = torch.ones(1, 1, 1, 1, device="cpu", dtype=torch.float32), torch.zeros(1, 1, 1, device="cpu")
    call = Inputs(one, one, one, gate, *[None] * 5)
    try:
        return (
            found.forward(*call, *Options(1.0, 0.0, 0.0, 0.0, 0.0, None), False)[0].shape == one.shape
            and pieces.span(one) > 0
        )
    except RuntimeError:  # NotImplementedError is one
        return False


PIECES: dict[str, PieceOperators] = {}
LIBRARIES, unusable = _load(Path(__file__).parent)
"""The operators of the built variants that this processor runs; and if there are none, why."""
variant = list(LIBRARIES)[-1] if LIBRARIES else None
"""The variant in use: the richest that was built and runs here."""

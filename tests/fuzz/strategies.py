"""What the attacks are made of, and in one place how far they go."""

import copy
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tests.text.reading import ODD
from tra.cli.parsing import ALIASES, arguments_of

FACTOR = int(os.environ.get("FUZZ_FACTOR", "0"))
"""Times the inputs of `make test` that `make fuzz` tries; 0 in `make test`."""

TRIED: Counter[str] = Counter()
"""Inputs of each attack."""

# How far the operator is driven. Widen these when its meaning is documented beyond them: scores whose unnormalised
# weights overflow beside large values, and sums of very many keys, are not yet within it.
LARGEST_SCORE = 30.0
LARGEST_VALUE = 1e4
MOST_KEYS = 300


def attack(examples: int) -> Callable[[Any], Any]:
    """Settings of a test that tries so many inputs in `make test`, the same ones every time."""
    return settings(max_examples=examples * max(1, FACTOR))


class Call(NamedTuple):
    """A call of the operator, in numbers that hypothesis can make smaller."""

    seed: int
    dtype: torch.dtype
    batch: int
    kv_heads: int
    group: int
    queries: int
    cached: int
    width: int
    value_width: int
    layouts: tuple[str, ...]
    """Of query, key, value and gate."""
    scale: float
    threshold: float
    tolerance: float | None
    bounded: bool
    gates: str
    value_size: float
    mask: str
    segments: bool
    dropout: float
    spoiled: tuple[tuple[str, float], ...]
    """Tensors of which one number is another: NaN, infinite, or as small as can be."""

    @property
    def options(self) -> dict[str, Any]:
        bound = self.width * self.scale if self.bounded else None
        return {"scale": self.scale, "threshold": self.threshold, "tolerance": self.tolerance, "score_bound": bound}


INFINITE = (math.nan, math.inf, -math.inf)
TINY = (1e-45, -0.0)
"""Not in queries and keys, whose scores would no longer be exact."""


@st.composite
def calls(draw: st.DrawFn, spoiled: bool = False, dropout: bool = False) -> Call:
    width = draw(st.sampled_from([1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 80]))
    # Queries and keys are whole numbers from -1 to 1 and scales powers of 2, so that every score is exact.
    scales = [scale for scale in (2.0, 1.0, 0.5, 0.125) if width * scale <= LARGEST_SCORE] or [0.125]
    spoils = st.one_of(
        st.tuples(st.sampled_from(["query", "key"]), st.sampled_from(INFINITE)),
        st.tuples(st.sampled_from(["value", "log_gate"]), st.sampled_from((*INFINITE, *TINY))),
    )
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    return Call(
        seed=draw(st.integers(0, 2**32)),
        dtype=dtype,
        batch=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        queries=draw(st.one_of(st.integers(1, 20), st.integers(1, MOST_KEYS // 2))),
        cached=draw(st.one_of(st.just(0), st.integers(0, MOST_KEYS // 2))),
        width=width,
        value_width=draw(st.sampled_from([0, 1, 2, 7, 16, 31, 64])),
        layouts=draw(st.tuples(*[st.sampled_from(["plain", "transposed", "sliced", "strided", "expanded"])] * 4)),
        scale=draw(st.sampled_from(scales)),
        threshold=draw(st.sampled_from([0.0, 0.0, -0.25, 0.25, -100.0, 1.0, 100.0])),
        tolerance=0.0 if spoiled else draw(st.sampled_from([None, None, 0.0, 1e-3, 0.5, 1e300])),
        bounded=draw(st.booleans()),
        gates=draw(st.sampled_from(["usual", "closed", "open", "mixed"])),
        value_size=draw(st.sampled_from([1.0, 1e-3, 1e3 if dtype == torch.float16 else LARGEST_VALUE])),
        mask=draw(st.sampled_from(["none", "none", "some", "left", "all"])),
        segments=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.1, 0.9])) if dropout else 0.0,
        spoiled=tuple(draw(st.lists(spoils, min_size=1, max_size=4))) if spoiled else (),
    )


def tensors(call: Call) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """The four tensors of a call by name, and its masks."""
    rng = torch.Generator().manual_seed(call.seed)
    heads, keys = call.kv_heads * call.group, call.queries + call.cached
    shapes = {
        "query": (call.batch, heads, call.queries, call.width),
        "key": (call.batch, call.kv_heads, keys, call.width),
        "value": (call.batch, call.kv_heads, keys, call.value_width),
        "log_gate": (call.batch, heads, call.queries),
    }
    found: dict[str, Tensor] = {}
    for (name, shape), layout in zip(shapes.items(), call.layouts, strict=True):
        if name == "log_gate":
            spread = {"usual": 1.1, "closed": 0.1, "open": 0.1, "mixed": 6.0}[call.gates]
            middle = {"usual": -0.7, "closed": 4.0, "open": -9.0, "mixed": 0.0}[call.gates]
            numbers = -torch.exp(middle + spread * torch.randn(shape, generator=rng)).clamp(max=6e4)  # of float16, too
        elif name == "value":
            numbers = torch.randint(-4, 5, shape, generator=rng) * (call.value_size / 4)
        else:
            numbers = torch.randint(-1, 2, shape, generator=rng).float()
        numbers = numbers.to(call.dtype)
        for spoiled, number in call.spoiled:
            if spoiled == name and numbers.numel() > 0 and not (name == "log_gate" and number > 0):
                place = int(torch.randint(numbers.numel(), (1,), generator=rng))
                numbers.view(-1)[place] = number
        found[name] = laid_out(numbers, layout)
    key_mask = {
        "none": None,
        "some": torch.rand(call.batch, keys, generator=rng) < 0.7,
        "left": torch.arange(keys)[None] >= torch.randint(keys + 1, (call.batch, 1), generator=rng),
        "all": torch.zeros(call.batch, keys, dtype=torch.bool),
    }[call.mask]
    segments = torch.randint(3, (call.batch, keys), generator=rng).sort(dim=1).values if call.segments else None
    return found, {"key_mask": key_mask, "segment_ids": segments}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides; of an expanded tensor, all rows of the batch are the first."""
    if layout == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), math.nan, dtype=tensor.dtype)
        wide[..., 1:-2] = tensor
        return wide[..., 1:-2]
    if layout == "strided":
        twice = torch.full((*tensor.shape[:2], 2 * tensor.shape[2], *tensor.shape[3:]), math.nan, dtype=tensor.dtype)
        twice[:, :, ::2] = tensor
        return twice[:, :, ::2]
    return tensor[:1].expand(tensor.shape) if layout == "expanded" else tensor


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, "", "x", "\ud800", [], {}, [[[]]], {"a": {"b": None}}, ["x"] * 3),
    *(0, -1, 1, 3, 1000, 10**30, 10**400, -(10**30), 0.5, -0.0, 1e308, 1e-320, math.nan, math.inf),
    *("9" * 50, "/etc/passwd", "../../x", "nan", "tra", "x" * 10_000),
)
NUMBERS = ("-1", "0", "1", "3", "1e3", "1e400", "nan", "inf", "-inf", str(10**30), "9" * 5000, "0x10", "1_0", "", " ")
WORDS = ("tra", "rope", "none", "\udcff", "\0", "x" * 5000, "--", "=", "a=b", "theta=nan", "{", '{"a": 1}', "🦜", "-x")


class Damage(NamedTuple):
    """What is done to one file: which, how, and where in it."""

    file: int
    how: str
    place: float
    value: Any


RAW = ("cut", "flip", "empty", "garbage", "nested", "long")
UNREADABLE = ("fifo", "folder")


def damages() -> st.SearchStrategy[Damage]:
    # Most ways are for JSON: a leaf, a branch, or the whole is another value, or is missing.
    hows = st.sampled_from(
        [*RAW, *UNREADABLE, "loop", "missing", "value", "value", "value", "value", "whole", "without"]
    )
    return st.builds(Damage, st.integers(0, 99), hows, st.floats(0, 1), st.sampled_from(ODD_VALUES))


def inflict(damage: Damage, files: list[Path]) -> Path:
    """Damage one of these files, and say which."""
    file = files[damage.file % len(files)]
    content = file.read_bytes()
    at = min(int(damage.place * len(content)), max(0, len(content) - 1))
    file.unlink()
    if damage.how == "fifo":
        os.mkfifo(file)
    elif damage.how == "folder":
        file.mkdir()
    elif damage.how == "loop":
        file.symlink_to(file.name)
    elif damage.how != "missing":
        file.write_bytes(_damaged(content, damage, at))
    return file


def _damaged(content: bytes, damage: Damage, at: int) -> bytes:
    simple = {
        "cut": content[:at],
        "flip": content[:at] + bytes([content[at] ^ 1 << (damage.file % 8)]) + content[at + 1 :] if content else b"",
        "empty": b"",
        "garbage": bytes(range(256)) * 4,
        "nested": b"[" * 200_000,
        "long": b"9" * 10_000,
        "whole": _json(damage.value),
    }
    if damage.how in simple:
        return simple[damage.how]
    try:
        stored = json.loads(content)
    except ValueError:
        return content[:at]
    changed = copy.deepcopy(stored)
    places = list(_places(changed))
    if not places:
        return _json(damage.value)
    holder, key = places[min(int(damage.place * len(places)), len(places) - 1)]
    if damage.how == "without":
        del holder[key]
    else:
        holder[key] = damage.value
    return _json(changed)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _places(value: Any, depth: int = 3) -> Any:
    """Each entry of nested lists and objects, down to some depth: a vocabulary has thousands that are alike."""
    entries = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, inner in entries[:40]:
        yield value, key
        if depth:
            yield from _places(inner, depth - 1)


def texts() -> st.SearchStrategy[bytes]:
    """Files of odd text: few kinds of pieces, long runs of them, and now and then what is no UTF-8."""
    pieces = st.sampled_from([*ODD, "\ufeff", "\0", "ACGT" * 200, "中文字" * 200, "。", "x" * 3000, "word "])
    runs = st.lists(st.tuples(pieces, st.integers(1, 60)), max_size=8)
    wrong = st.sampled_from([b"", b"", b"", b"", b"\xff", b"\xed\xa0\x80", b"\xc3"])
    return st.builds(lambda parts, end: "".join(x * n for x, n in parts).encode() + end, runs, wrong)


def command_lines(kind: type, first: list[str]) -> st.SearchStrategy[list[str]]:
    """Arguments over the options that a command really has, with good and bad values."""
    names = (name for option in arguments_of(kind) if not option.is_positional for name in option.names)
    known = sorted({*names, *ALIASES, *(f"--{entry.name}" for entry in fields(kind)), "--nonsense", "-h"})
    value = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.text(max_size=5))
    option = st.one_of(
        st.builds(lambda name, values: [name, *values], st.sampled_from(known), st.lists(value, max_size=2)),
        st.builds(lambda name, text: [f"{name}={text}"], st.sampled_from(known), value),
        st.builds(lambda text: [text], value),
    )
    return st.builds(lambda parts: [*first, *(word for part in parts for word in part)], st.lists(option, max_size=4))

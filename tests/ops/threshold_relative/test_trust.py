"""The kernels' check of themselves: in the interpreter, with kernels that are right and one that is made wrong."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.inputs import random_inputs
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import implementations, op, reference, triton
from tra.ops.threshold_relative.triton.tiles import Tile

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="computes in Triton's interpreter")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small problems, no verdicts from before, and a place of its own for new ones."""
    from tra.ops.threshold_relative.triton import launch, tiles, trust

    monkeypatch.setattr(tiles, "choices", lambda *_: (Tile(16, 4),))
    monkeypatch.setattr(tiles, "keys_per_block", lambda *_: 16)
    for name, number in (("NEAR_KEYS", 16), ("PART_KEYS", 32), ("FIRST_ROUND", 1), ("MOST_ROWS", 16)):
        monkeypatch.setattr(launch, name, number)
    sizes = {"LENGTH": 40, "PACKED_LENGTH": 50, "CUT": 16, "CACHED": 90, "ROOM": 30, "WIDTH": 16}
    for name, number in sizes.items():
        monkeypatch.setattr(trust, name, number)
    monkeypatch.setattr(trust, "_verdicts", {})
    monkeypatch.setattr(trust, "_place", lambda device: tmp_path / "cache" / "verdicts.json")


class Wrong:
    """A kernel whose scores are a hundredth too large."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self.kernel[grid](**given | {"scale": given["scale"] * 1.01})


@pytest.mark.parametrize("kind", ["forward", "decode", "backward", "straight_through", "packed", "pieces"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_kernels_pass(kind: str, dtype: torch.dtype) -> None:
    from tra.ops.threshold_relative.triton import trust

    verdict = trust.examine(CPU, dtype, kind)
    assert verdict.failure is None
    assert verdict.error > 0.0


@pytest.mark.parametrize(
    "name, kind, what",
    [
        ("forward", "forward", "out"),
        ("decode_part", "decode", "out"),
        ("backward_query", "backward", "grad_query"),
        ("backward_key", "straight_through", "grad_(key|value)"),
        ("resume_query", "pieces", "grad_query"),
        ("piece_key", "pieces", "grad_(key|value)"),
    ],
)
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, name: str, kind: str, what: str) -> None:
    from tra.ops.threshold_relative.triton import kernels, trust

    monkeypatch.setattr(kernels, name, Wrong(getattr(kernels, name)))
    verdict = trust.examine(CPU, torch.float32, kind)
    assert verdict.failure is not None
    assert re.match(f"{what} is off by ", verdict.failure)


@pytest.mark.parametrize("dtype", triton.TYPES, ids=str)
@pytest.mark.parametrize("kind", ["forward", "decode", "backward", "straight_through", "packed", "pieces"])
def test_a_wrong_number_is_found_in_every_kind_and_dtype(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    """The reference passes. It fails with scores 1% too large (10% in bfloat16), one NaN, and a row of zeros."""
    monkeypatch.undo()  # problems as large as they are in use
    from tra.ops.threshold_relative.triton import trust

    def computed(inputs: Any, options: Any, grad: Tensor, trains: bool, scale: float = 1.0) -> dict[str, Tensor]:
        result = reference.forward(inputs, options._replace(scale=scale * options.scale, score_bound=None), trains)
        gradients = reference.backward(grad, inputs, result, options)._asdict() if trains else {}
        return {"out": result.out, **{f"grad_{name}": x for name, x in gradients.items() if x is not None}}

    def off(*given: Any) -> dict[str, Tensor]:
        return computed(*given, scale=1.1 if dtype == torch.bfloat16 else 1.01)

    def spoilt(*given: Any) -> dict[str, Tensor]:
        found = computed(*given)
        found["out"][0, 1, -1, 3] = torch.nan
        return found

    def incomplete(*given: Any) -> dict[str, Tensor]:
        found = computed(*given)
        last = list(found)[-1]  # the output, or the gradient of gates
        found[last][0, 0, found[last][0, 0].abs().argmax() // found[last][0, 0, 0].numel()] = 0.0
        return found

    assert trust.compare_with_reference(kind, dtype, computed).failure is None
    for wrong in (off, spoilt, incomplete):
        assert trust.compare_with_reference(kind, dtype, wrong).failure is not None, wrong.__name__


def test_a_kernel_that_reads_what_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import kernels, trust

    class Deaf(Wrong):
        """A kernel that is told no lengths."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: self.kernel[grid](**given | {"lengths_ptr": None})

    monkeypatch.setattr(kernels, "decode_part", Deaf(kernels.decode_part))
    verdict = trust.examine(CPU, torch.float32, "decode")
    assert verdict.failure is not None
    assert verdict.failure.startswith("out_with_lengths is off by ")


def test_a_kernel_that_is_wrong_only_where_packed_rows_go_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import kernels, trust

    class WrongLater(Wrong):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            wrong = super().__getitem__(grid)
            return lambda **given: (wrong if given["RESUMES"] else self.kernel[grid])(**given)

    monkeypatch.setattr(kernels, "forward", WrongLater(kernels.forward))
    assert trust.examine(CPU, torch.float32, "forward").failure is None
    verdict = trust.examine(CPU, torch.float32, "packed")
    assert verdict.failure is not None
    assert verdict.failure.startswith("out is off by ")


def test_packed_rows_are_asked_about_where_rows_are_packed(checked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import launch, trust

    monkeypatch.setattr(trust, "examine", lambda device, dtype, kind: trust.Verdict(kind, str(dtype), 0.0, 0.0, None))
    monkeypatch.setattr(launch, "PACKED_FROM", 5)
    inputs = few()
    threshold_relative_attention(*(x[:, :, :4] for x in inputs))
    assert {kind for *_, kind in trust._verdicts} == {"forward"}
    threshold_relative_attention(*inputs, tolerance=0.0)
    assert {kind for *_, kind in trust._verdicts} == {"forward"}
    threshold_relative_attention(*inputs)
    assert {kind for *_, kind in trust._verdicts} == {"forward", "packed"}


def test_plain_pytorch_has_the_gradients_of_the_reference() -> None:
    """What kernels are measured by is itself right."""
    from tra.ops.threshold_relative.triton import trust

    for kind in ("backward", "straight_through"):
        inputs, options, grad = trust.problem(kind, torch.float64)
        exact = trust._reference(trust._in_double(inputs), options, grad)
        plain = trust._plain(trust._in_double(inputs), options, grad)
        for name, right in plain.items():
            assert (right - exact[name]).abs().max() < 1e-12, name


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are checked on the CPU too, "auto" takes them there, and the kinds that were examined are listed."""
    from tra.ops.threshold_relative.triton import trust

    examine, examined = trust.examine, []

    def listed(device: torch.device, dtype: torch.dtype, kind: str) -> Any:
        examined.append(kind)
        return examine(device, dtype, kind)

    monkeypatch.setattr(trust, "examine", listed)
    monkeypatch.setattr(triton, "CHECKED", ("cuda", "cpu"))
    monkeypatch.setattr(triton, "only_by_name", lambda inputs: False)
    monkeypatch.setattr(implementations, "_said", set())
    for module in (implementations, op):
        monkeypatch.setattr(module, "IMPLEMENTATIONS", {"triton": triton, "reference": reference})
    return examined


def few() -> tuple[Tensor, ...]:
    return random_inputs(1, 2, queries=5, width=16, dtype=torch.float32)


def test_a_kernel_is_examined_once_and_by_what_is_used(checked: list[str]) -> None:
    inputs = few()
    threshold_relative_attention(*inputs)
    threshold_relative_attention(*inputs)
    assert checked == ["forward"]
    threshold_relative_attention(inputs[0].requires_grad_(), *inputs[1:]).sum().backward()
    assert checked == ["forward", "backward"]


def test_a_verdict_outlives_the_process(checked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import trust

    threshold_relative_attention(*few())
    stored = json.loads(trust._place(CPU).read_text())
    assert list(stored) == ["float32 forward"]
    monkeypatch.setattr(trust, "_verdicts", {})  # as a new process finds it
    threshold_relative_attention(*few())
    assert checked == ["forward"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_auto_leaves_a_wrong_kernel_to_the_reference_and_says_so_once(
    checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tra.ops.threshold_relative.triton import kernels

    monkeypatch.setattr(kernels, "forward", Wrong(kernels.forward))
    inputs = few()
    said = r"fails its check on cpu \(forward in float32: out is off by .*\); please report it .*tra doctor"
    with pytest.warns(UserWarning, match=said):
        out = threshold_relative_attention(*inputs)
    assert torch.equal(out, threshold_relative_attention(*inputs, impl="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threshold_relative_attention(*inputs)
    with pytest.raises(ValueError, match=f"impl 'triton' {said}"):
        threshold_relative_attention(*inputs, impl="triton")
    assert checked == ["forward"]
    call = implementations.Inputs(*inputs, *[None] * 5)
    with pytest.raises(RuntimeError, match="impl 'triton' fails its check"):  # as a compiled graph would call it
        triton.forward(call, implementations.Options(1.0, 0.0, 0.0, 0.0, 0.0, None), False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_kernel_that_raises_is_not_condemned_for_good(checked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import launch, trust

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(launch, "forward", out_of_memory)
    with pytest.warns(UserWarning, match="RuntimeError: out of memory"):
        threshold_relative_attention(*few())
    assert not trust._place(CPU).exists()


def test_nothing_is_examined_while_a_graph_is_captured(checked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import trust

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert trust.distrust(CPU, torch.float32, ("forward",)) is None
    assert checked == []


def test_a_callers_modes_do_not_disturb_the_check(checked: list[str]) -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        threshold_relative_attention(*(x.float() for x in few()))
    assert checked == ["forward"]


def test_the_reference_takes_one_thread_and_the_kernel_those_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more, `tra doctor` took minutes on a busy machine."""
    from tra.ops.threshold_relative.triton import trust

    seen, threads = {}, torch.get_num_threads()

    def noting(name: str, function: Any) -> Any:
        def noted(*given: Any) -> Any:
            seen[name] = torch.get_num_threads()
            return function(*given)

        return noted

    for name in ("_reference", "_plain", "_distance"):
        monkeypatch.setattr(trust, name, noting(name, getattr(trust, name)))
    torch.set_num_threads(3)
    try:
        trust.compare_with_reference("forward", torch.float32, noting("kernel", lambda *_: {"out": torch.zeros(1)}))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert seen == {"_reference": 1, "_plain": 1, "_distance": 1, "kernel": 3}


def test_where_a_verdict_is_stored_depends_on_the_machine_and_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    import triton as compiler

    from tra.ops.threshold_relative.triton import trust

    changes: list[tuple[Any, str, Any]] = [
        (trust, "_device_name", lambda device: "another"),
        (trust, "driver", lambda: "another"),
        (torch, "__version__", "another"),
        (compiler, "__version__", "another"),
        (trust, "__version__", "another"),
        (trust, "_sources", lambda: "another"),
    ]
    places = {trust._place(CPU)}
    for owner, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            places.add(trust._place(CPU))
    assert len(places) == 1 + len(changes)
    assert {place.parents[1] for place in places} == {Path(compiler.knobs.cache.dir)}

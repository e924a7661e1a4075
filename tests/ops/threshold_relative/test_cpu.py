"""What the native CPU kernel promises beyond the operator's semantics: bits, accuracy, certificate, memory."""

import math
import multiprocessing
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from torch.testing import assert_close

from tests.ops.inputs import integer_inputs, random_inputs
from tests.ops.oracle import dense_attention
from tra import Decoder, DecoderConfig
from tra.bench.memory import peak_of_attention
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu, implementations, registration
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS


@pytest.fixture(params=sorted(cpu.LIBRARIES) or ["none built"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "variant", request.param)
    return request.param


def run(*inputs: Tensor, impl: str = "cpu", **options: object) -> Tensor:
    return threshold_relative_attention(*inputs, impl=impl, **options)


def gradients(inputs: tuple[Tensor, ...], grad: Tensor, seed: int = 0, **options: object) -> list[Tensor]:
    """Output and the four gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    torch.manual_seed(seed)
    out = run(*leaves, **options)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def with_any_threads(inputs: tuple[Tensor, ...], grad: Tensor, **options: object) -> list[Tensor]:
    """Output and gradients, whose bits must not depend on the number of threads."""
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            found.append(gradients(inputs, grad, **options))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(equal_bits(left, right) for left, right in zip(found[0], other, strict=True))
    return found[0]


def language_like(batch: int, heads: int, length: int, width: int = 64, seed: int = 0) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, heads, length, width, generator=rng) for _ in range(3))
    gate = -torch.exp(math.log(0.7) + 1.1 * torch.randn(batch, heads, length, generator=rng))
    return rms_norm(query, (width,)), rms_norm(key, (width,)), value, gate


def equal_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def test_every_variant_for_this_processor_is_built() -> None:
    assert "generic" in cpu.LIBRARIES
    assert cpu.variant == list(cpu.LIBRARIES)[-1]
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if " avx2 " in flags:
        assert "avx2" in cpu.LIBRARIES


@pytest.mark.parametrize(
    "inputs, message",
    [
        (random_inputs(), "impl 'cpu' computes in float32, bfloat16 and float16, got torch.float64"),
        (random_inputs(width=257, dtype=torch.float32), "impl 'cpu' takes widths up to 256, got 257 and 257"),
        (random_inputs(value_width=300, dtype=torch.float32), "impl 'cpu' takes widths up to 256, got 8 and 300"),
    ],
)
def test_what_it_cannot_take_it_refuses_and_auto_gives_to_the_reference(
    inputs: tuple[Tensor, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(*inputs)
    assert equal_bits(run(*inputs, impl="auto"), run(*inputs, impl="reference"))


def test_more_keys_than_it_can_count_are_refused() -> None:
    query, key = torch.empty(1, 1, 1, 1, device="meta"), torch.empty(1, 1, 2**24 + 1, 1, device="meta")
    with pytest.raises(ValueError, match="impl 'cpu' takes up to 16777216 keys, got 16777217"):
        run(query, key, key, torch.empty(1, 1, 1, device="meta"))


def test_it_says_what_it_refuses() -> None:
    assert cpu.about() == (
        f"native kernel, {cpu.variant}; refuses other devices than the CPU, float64, "
        "widths over 256, more than 16,777,216 keys"
    )


def _unreadable(folder: Path) -> None:
    (folder / "_kernel_generic.so").write_text("not a library")


def _of_other_sources(folder: Path) -> None:
    """A library that loads and registers no operator."""
    source = folder / "empty.cpp"
    source.write_text("")
    subprocess.run(["g++", "-shared", "-o", folder / "_kernel_generic.so", source], check=True)


@pytest.mark.parametrize(
    "build, reason",
    [
        (lambda folder: None, "is not built"),
        (_unreadable, "cannot be loaded"),
        (_of_other_sources, "was built from other sources than this package's"),
    ],
    ids=["none", "not a library", "no operator"],
)
def test_a_library_that_does_not_fit_is_never_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Callable[[Path], None], reason: str
) -> None:
    build(tmp_path)
    defined, pieces = iter(["defined_for_a_test"]), iter(["of_a_test"])  # a name is defined once
    with monkeypatch.context() as faked:
        faked.setattr(cpu, "define", lambda _, keeps: registration.define(next(defined), keeps))
        faked.setattr(cpu, "define_pieces", lambda _: registration.define_pieces(next(pieces)))
        faked.setattr(cpu, "PIECES", {})
        libraries, unusable = cpu._load(tmp_path)
    assert libraries == {}
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", cpu)  # which interpreted would take the call
    for attribute, found in (("LIBRARIES", libraries), ("variant", None), ("unusable", unusable)):
        monkeypatch.setattr(cpu, attribute, found)
    monkeypatch.setattr(implementations, "_said", set())
    inputs = random_inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match=f"impl 'cpu' {reason}.*reinstall threshold-relative-attention"):
        run(*inputs)
    with pytest.warns(UserWarning, match=f"slower without its native CPU kernel, which {reason}") as caught:
        out = run(*inputs, impl="auto")
    assert [warning.filename for warning in caught] == [__file__]
    assert equal_bits(out, run(*inputs, impl="reference"))
    run(*inputs, impl="auto")  # says it once
    assert reason in cpu.about()


def assert_twice_as_exact(inputs: tuple[Tensor, ...], grad: Tensor, keep: Tensor, **options: object) -> None:
    """The error of output and gradients against double precision is at most twice that of plain float32, plus one
    rounding of the largest term that each of them sums: where the terms cancel, nobody does better."""
    query, key, value, _ = inputs

    def dense(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = dense_attention(*leaves, keep)
        out.backward(grad.to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    group = query.shape[1] // key.shape[1]
    product = (grad @ value.repeat_interleave(group, 1).mT).abs().max() / math.sqrt(query.shape[3])
    terms = (value, product * key.abs(), product * query.abs(), grad, product)
    results = zip(
        *(("out", "q", "k", "v", "g"), dense(torch.float64), dense(torch.float32)),
        *(gradients(inputs, grad, **options), terms),
        strict=True,
    )
    for name, exact, plain, ours, term in results:
        allowed = 2 * (plain.double() - exact).abs().max() + torch.finfo(torch.float32).eps * term.abs().max()
        error = (ours.double() - exact).abs().max()
        assert error <= allowed, f"{name}: {error:.3g} > {allowed:.3g}"


@pytest.mark.parametrize("length, width", [(1, 1), (7, 3), (63, 16), (111, 40), (250, 64), (65, 128), (40, 256)])
@pytest.mark.parametrize("tolerance", [0.0, None])
def test_error_is_at_most_twice_that_of_plain_float32(
    variant: str, length: int, width: int, tolerance: float | None
) -> None:
    """On real-valued inputs."""
    query, key, value, gate = language_like(2, 4, length, width)
    inputs, grad = (query, key[:, :2], value[:, :2], gate), torch.randn(2, 4, length, width)
    identity = torch.eye(length).expand(2, 2, length, length)
    keep = run(query, key[:, :2], identity, torch.zeros_like(gate), tolerance=0.0) > 0
    assert_twice_as_exact(inputs, grad, keep, tolerance=tolerance)


def many_keys(queries: int, keys: int, values: float | None, gate: float) -> tuple[Tensor, ...]:
    """All keys are kept, and values have one sign, so that errors cannot hide behind it; random ones where None."""
    rng = torch.Generator().manual_seed(1)
    query, key, value = torch.ones(1, 1, queries, 2), torch.full((1, 1, keys, 2), 0.3), torch.empty(1, 1, keys, 3)
    if values is None:
        key.uniform_(0.01, 1.0, generator=rng)
        value.uniform_(0.0, 1.0, generator=rng)
    else:
        value.fill_(values)
    return query, key, value, torch.full((1, 1, queries), gate)


@pytest.mark.parametrize("keys", [4096, 65_537, 2**20, 2**24])
@pytest.mark.parametrize("gate", [0.0, -1e-4])
def test_ones_average_to_one_however_many(variant: str, keys: int, gate: float) -> None:
    query, key, value, gates = many_keys(1, keys, 1.0, gate)
    out = run(query, key, value, gates, tolerance=0.0)
    assert (out - 1).abs().max() <= torch.finfo(torch.float32).eps


def test_ones_average_to_one_in_every_row(variant: str) -> None:
    inputs = many_keys(4099, 4099, 1.0, 0.0)
    assert (run(*inputs) - 1).abs().max() <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("queries, keys", [(1, 2**20), (150, 5000), (1100, 1100)])
@pytest.mark.parametrize("values", [1.0, 0.1, None])
def test_error_is_at_most_twice_that_of_plain_float32_over_many_keys(
    variant: str, queries: int, keys: int, values: float | None
) -> None:
    inputs = many_keys(queries, keys, values, -1e-4)
    grad = torch.empty(1, 1, queries, 3).uniform_(1.0, 2.0, generator=torch.Generator().manual_seed(2))
    keep = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(1, 1, queries, keys)
    assert_twice_as_exact(inputs, grad, keep, tolerance=0.0)


@pytest.mark.parametrize("length, width", [(1, 1), (7, 3), (63, 16), (111, 40), (300, 64), (40, 256)])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_equals_the_reference_in_double_precision_where_scores_are_exact(
    variant: str, length: int, width: int, dropout: float
) -> None:
    query, key, value, gate = integer_inputs(batch=2, heads=4, length=length, width=width)
    inputs, grad = (query, key[:, :2], value[:, :2], gate), torch.randn(query.shape)
    exact = gradients(tuple(x.double() for x in inputs), grad, impl="reference", dropout=dropout)
    for right, ours in zip(exact, gradients(inputs, grad, dropout=dropout), strict=True):
        assert_close(ours.double(), right, rtol=1e-5, atol=2e-6 * (1 + right.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out_is_float32_inside(variant: str, dtype: torch.dtype) -> None:
    query, key, value, gate = integer_inputs(dtype=dtype)
    inputs, grad = (query, key, value, gate.float()), torch.randn(query.shape).to(dtype)
    exact = gradients(tuple(x.double() for x in inputs), grad, impl="reference", tolerance=0.0)
    kernel = gradients(inputs, grad, tolerance=0.0)
    # Backward reads the output as it was stored, so even the float32 gate's gradient carries the dtype's rounding.
    rounding = torch.finfo(dtype).eps
    for right, ours, given in zip(exact[1:], kernel[1:], inputs, strict=True):
        assert ours.dtype == given.dtype
        assert_close(ours.double(), right, rtol=2 * rounding, atol=rounding * right.abs().max().item())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tolerance", [0.0, None])
def test_same_bits_on_every_run_and_for_any_number_of_threads(
    variant: str, masked: bool, tolerance: float | None
) -> None:
    inputs = language_like(2, 3, 333, 24)
    grad = torch.randn(2, 3, 333, 24)
    options: dict[str, object] = {"tolerance": tolerance, "dropout": 0.1}
    if masked:
        options["key_mask"] = torch.rand(2, 333) < 0.8
        options["segment_ids"] = torch.randint(4, (2, 333)).sort(dim=1).values
    with_any_threads(inputs, grad, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tolerance, heads, length", [(0.0, 8, 555), (1e-6, 64, 290)])
def test_gradients_that_several_blocks_of_rows_add_to(
    variant: str, tolerance: float, heads: int, length: int, dtype: torch.dtype
) -> None:
    # The more query heads share keys, the fewer positions make a block of backward: here there are three.
    query, key, value, gate = integer_inputs(1, heads, length, 8, dtype)
    inputs = (query[:, :, 10:], key[:, :1], value[:, :1], gate[:, :, 10:].float() / 20)
    grad = torch.randn(inputs[0].shape).to(dtype)
    options: dict[str, object] = {"tolerance": tolerance, "key_mask": torch.rand(1, length) < 0.9}
    ours = with_any_threads(inputs, grad, **options)
    exact = gradients(tuple(x.double() for x in inputs), grad, impl="reference", **options)
    rounding = 4 * torch.finfo(dtype).eps
    for right, found in zip(exact, ours, strict=True):
        assert_close(found.double(), right, rtol=rounding, atol=rounding * (1 + right.abs().max().item()))


@pytest.mark.parametrize("tolerance", [0.0, None, 1e-3])
@pytest.mark.parametrize("bound", [None, 8.0])
def test_same_bits_alone_or_in_a_batch(variant: str, tolerance: float | None, bound: float | None) -> None:
    inputs = language_like(5, 2, 150)
    grad = torch.randn(5, 2, 150, 64)
    options = {"tolerance": tolerance, "score_bound": bound}
    together = gradients(inputs, grad, **options)
    for index in (0, 3):
        row = slice(index, index + 1)
        alone = gradients(tuple(x[row] for x in inputs), grad[row], **options)
        assert all(equal_bits(left[row], right) for left, right in zip(together, alone, strict=True))


@pytest.mark.parametrize("padding", ["left", "right", "both", "between"])
@pytest.mark.parametrize("tolerance", [0.0, None])
def test_same_bits_padded_or_not(variant: str, padding: str, tolerance: float | None) -> None:
    length, whole = 450, 537  # several spans
    places = torch.arange(length) + {"left": whole - length, "right": 0, "both": 37, "between": 0}[padding]
    if padding == "between":
        places = torch.randperm(whole, generator=torch.Generator().manual_seed(2))[:length].sort().values
    inputs = language_like(2, 2, length)
    options = {"tolerance": tolerance, "score_bound": 8.0}
    plain = run(*inputs, **options)
    query, key, value, gate = padded = language_like(2, 2, whole, seed=1)
    for noise, part in zip(padded, inputs, strict=True):
        noise[:, :, places] = part
    mask = torch.zeros(2, whole, dtype=torch.bool)
    mask[:, places] = True
    out = run(*padded, key_mask=mask, **options)
    assert equal_bits(out[:, :, places], plain)
    last = int(places[-1])
    seen = slice(last + 1)
    decoded = run(
        *(query[:, :, [last]], key[:, :, seen], value[:, :, seen], gate[:, :, [last]]),
        key_mask=mask[:, seen],
        **options,
    )
    assert equal_bits(decoded, plain[:, :, -1:])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tolerance", [0.0, None])
@pytest.mark.parametrize("bound", [None, 8.0])
def test_same_bits_prefilled_or_decoded(
    variant: str, kv_heads: int, tolerance: float | None, bound: float | None
) -> None:
    query, key, value, gate = language_like(2, 4, 497)  # several spans
    key, value = key[:, :kv_heads], value[:, :kv_heads]
    full = run(query, key, value, gate, tolerance=tolerance, score_bound=bound)
    for pieces in ([400] + [1] * 97, [50, 3, 1, 443]):
        end, parts = 0, []
        for size in pieces:
            start, end = end, end + size
            parts.append(
                run(
                    *(query[:, :, start:end], key[:, :, :end], value[:, :, :end], gate[:, :, start:end]),
                    tolerance=tolerance,
                    score_bound=bound,
                )
            )
        assert equal_bits(torch.cat(parts, dim=2), full)


def test_any_strides_give_the_same_bits(variant: str) -> None:
    inputs = language_like(2, 4, 70, 24)
    grad = torch.randn(2, 4, 70, 24)
    plain = gradients(inputs, grad)
    layouts = (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
        lambda x: x.flip(2).flip(2).expand(*x.shape),
    )
    for layout in layouts:
        strided = [layout(x) for x in inputs]
        assert equal_bits(run(*strided), plain[0])
        leaves = [x.requires_grad_() for x in strided]
        run(*leaves).backward(layout(grad))
        for leaf, expected in zip(leaves, plain[1:], strict=True):
            assert equal_bits(leaf.grad, expected)
    shared = inputs[1][:, :1].expand(2, 4, 70, 24)  # a stride of 0
    assert equal_bits(run(inputs[0], shared, inputs[2], inputs[3]), run(inputs[0], shared.clone(), *inputs[2:]))


def test_dropout_removes_the_weights_that_the_reference_removes(variant: str) -> None:
    inputs = integer_inputs(batch=2, heads=3, length=77)
    for probability in (0.01, 0.5, 0.9):
        torch.manual_seed(5)
        expected = run(*inputs, dropout=probability, impl="reference")
        torch.manual_seed(5)
        assert_close(run(*inputs, dropout=probability), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", [0.0, -1e-8, -1e-3, -0.7, -100.0])
@pytest.mark.parametrize("size", [1e-20, 1.0, 100.0])
@pytest.mark.parametrize("tolerance", [0.0, None])
def test_any_gate_and_size_of_score_is_safe(variant: str, gate: float, size: float, tolerance: float | None) -> None:
    query, key, value, _ = integer_inputs(length=111)
    gates = torch.full(query.shape[:3], gate)
    inputs, grad = (query * size, key * size, value, gates), torch.randn(value.shape)
    exact = gradients(tuple(x.double() for x in inputs), grad, impl="reference")
    for right, ours in zip(exact, gradients(inputs, grad, tolerance=tolerance), strict=True):
        # float32 holds logits of 1e5 to 1e-2 at best, and weights no better than that.
        allowed = (1e-2 if size > 1 else 1e-5) * (1 + right.abs().max().item())
        assert_close(ours.double(), right, rtol=1e-4, atol=allowed)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-4])
@pytest.mark.parametrize("kind", ["random", "all kept", "rising", "weak gates", "far spike"])
@pytest.mark.parametrize("threshold", [0.0, 0.5, -0.5])
def test_certificate_holds(variant: str, tolerance: float, kind: str, threshold: float) -> None:
    """|out(tolerance) - out(0)| <= tolerance * max |value|, on inputs made to strain it."""
    query, key, value, gate = language_like(2, 2, 600, 16, seed=3)
    if kind != "random":
        query = torch.ones_like(query)
    if kind == "all kept":
        key = torch.full_like(key, 0.3)
    if kind == "rising":
        # The further back, the larger the score, up to the bound: the discarded tail is as heavy as it can be.
        key = torch.linspace(1.0, 0.01, 600)[:, None].expand(2, 2, 600, 16).contiguous()
    if kind == "weak gates":
        key, gate = key.abs(), torch.full_like(gate, -0.01)
    if kind == "far spike":
        key = torch.full_like(key, 0.01)
        key[:, :, ::50] = 1.0
        gate = torch.full_like(gate, -0.05)
    value = value.sign() * torch.linspace(1.0, -1.0, 600)[:, None].sign()
    options = {"score_bound": 4.0, "threshold": threshold}
    whole = run(query, key, value, gate, tolerance=0.0, **options).double()
    stopped = run(query, key, value, gate, tolerance=tolerance, **options).double()
    assert (stopped - whole).abs().max() <= tolerance * value.abs().max() + 2e-6
    bare = run(query, key, value, gate, tolerance=tolerance, threshold=threshold).double()
    assert (bare - whole).abs().max() <= tolerance * value.abs().max() + 2e-6


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2])
@pytest.mark.parametrize("gates", ["language", -0.02, -0.3])
def test_certificate_bounds_the_gradients(variant: str, tolerance: float, gates: str | float) -> None:
    """The table of docs/kernel.md."""
    query, key, value, gate = language_like(1, 2, 500, 16, seed=4)
    if isinstance(gates, float):
        query, gate = torch.ones_like(query), torch.full_like(gate, gates)
        key = torch.linspace(1.0, 0.01, 500)[:, None].expand(1, 2, 500, 16).contiguous()
    grad = torch.randn(1, 2, 500, 16)
    inputs = (query, key, value, gate)
    whole, stopped = (gradients(inputs, grad, tolerance=t, score_bound=4.0) for t in (0.0, tolerance))
    _, dq, dk, dv, dg = ((a - b).double() for a, b in zip(stopped, whole, strict=True))
    largest = (grad @ value.mT).abs().amax(-1).double()
    rounding = 1e-4
    assert (dv.abs().sum(2) <= tolerance * grad.abs().sum(2) + rounding).all()
    assert (dq.norm(dim=-1) <= 3 * tolerance * largest / 4 * key.norm(dim=-1).max() + rounding).all()
    assert (dk.norm(dim=-1).sum(-1) <= 3 * tolerance / 4 * (largest * query.norm(dim=-1)).sum(-1) + rounding).all()
    odds = 4.0 * 1.001 + math.log(2 / tolerance)
    count = ((odds + math.log1p(math.exp(-odds))) / -gate.double()).ceil()
    assert (dg.abs() <= tolerance * largest * (4 * count - 1 / torch.expm1(gate.double())) + rounding).all()
    assert dq.abs().max() > 0  # something was left out


def test_early_stop_really_leaves_keys_out(variant: str) -> None:
    query = torch.ones(1, 1, 300, 4)
    identity = torch.eye(300)[:, :200].reshape(1, 1, 300, 200).contiguous()
    gate = torch.full((1, 1, 300), -1.0)
    weights = run(query, query, identity, gate, tolerance=1e-3)[0, 0, 299]
    whole = run(query, query, identity, gate, tolerance=0.0)[0, 0, 299]
    assert (whole[250:] > 0).all()
    assert (weights[:250] == 0).all()


def test_default_tolerance_is_indistinguishable_from_visiting_everything(variant: str) -> None:
    inputs, grad = language_like(1, 4, 700), torch.randn(1, 4, 700, 64)
    whole, default = gradients(inputs, grad, tolerance=0.0), gradients(inputs, grad)
    for left, right in zip(whole, default, strict=True):
        assert_close(left, right, rtol=1e-5, atol=2e-6 * left.abs().max().item())


def test_several_python_threads_at_once_get_their_own_results() -> None:
    problems = [language_like(1, 2, 200, seed=seed) for seed in range(4)]
    expected = [run(*inputs) for inputs in problems]
    failures: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not equal_bits(run(*problems[index]), expected[index]):
                failures.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def _in_child(queue, inputs: tuple[Tensor, ...], grad: Tensor) -> None:  # type: ignore[no-untyped-def]
    queue.put([x.numpy().tobytes() for x in gradients(inputs, grad)])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_works_after_fork() -> None:
    # Made before the fork: PyTorch's own operations may hang after it.
    inputs, grad = language_like(1, 2, 200), torch.ones(1, 2, 200, 64)
    expected = gradients(inputs, grad)  # the parent's pool is running
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue, inputs, grad), daemon=True)
    child.start()
    found = queue.get(timeout=60)
    child.join()
    assert found == [x.numpy().tobytes() for x in expected]


class _Attended(torch.utils.data.Dataset):
    """Each item is what the operator and a model make of a seed."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        torch.manual_seed(index)
        model = Decoder(DecoderConfig(9, layers=1, heads=2, width=256))
        with torch.no_grad():
            read = model(torch.randint(9, (4, 128)))
        return torch.cat([run(*language_like(2, 2, 200, seed=index)).flatten(), read.flatten()])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_operator_and_models_work_in_the_workers_of_a_data_loader() -> None:
    data = _Attended()
    expected = [data[index] for index in range(2)]  # the parent's pool is running
    loader = torch.utils.data.DataLoader(
        data, num_workers=1, batch_size=None, multiprocessing_context="fork", timeout=60
    )
    for found, item in zip(loader, expected, strict=True):
        assert_close(found, item)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_is_linear_in_the_length() -> None:
    # Output and gradients are 268 MB; one 32,768 x 32,768 matrix of one head would be 4,295 MB.
    assert 200 < peak_of_attention(every_key=False) < 500

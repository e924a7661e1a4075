"""Gradients that pass the threshold, and a threshold and a bound for each row.

The reference, the Triton kernels and every variant of the CPU kernel against autograd of the dense form in double
precision.
"""

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.straight_through_oracle import straight_through_attention
from tra.bench.memory import added_megabytes, in_fresh_process, measurable
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu
from tra.ops.threshold_relative.dropout import dropout_factor

NAMES = ("out", "query", "key", "value", "log_gate", "threshold")


@pytest.fixture(params=sorted(cpu.LIBRARIES))
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "variant", request.param)
    return request.param


@pytest.fixture(params=["reference", *sorted(cpu.LIBRARIES)])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return chosen(request.param, monkeypatch)


@pytest.fixture(params=["reference", "triton", *sorted(cpu.LIBRARIES)])
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return chosen(request.param, monkeypatch)


def chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if name in ("reference", "triton"):
        return name
    monkeypatch.setattr(cpu, "variant", name)
    return "cpu"


class Case(NamedTuple):
    """Queries and keys of small integers and thresholds between their scores, so that all agree on what is kept."""

    inputs: tuple[Tensor, ...]
    """Query, key, value, log_gate and threshold."""
    grad: Tensor
    options: dict[str, object]


def case(
    seed: int = 0,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 63,
    keys: int = 63,
    width: int = 16,
    gate: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Case:
    rng = torch.Generator().manual_seed(seed)
    query = torch.randint(-1, 2, (batch, heads, queries, width), generator=rng)
    key = torch.randint(-1, 2, (batch, kv_heads, keys, width), generator=rng)
    value, grad = (torch.randn(batch, n, m, width + 3, generator=rng) for n, m in ((kv_heads, keys), (heads, queries)))
    log_gate = -2 * gate * torch.rand(batch, heads, queries, generator=rng)
    threshold = torch.randint(-4, 5, log_gate.shape, generator=rng) / 4 + 0.125
    threshold[:, 0, ::5] = 100.0  # keeps nothing
    threshold[:, 1] = -100.0  # keeps everything
    inputs = (*(x.to(dtype) for x in (query, key, value)), log_gate, threshold)
    return Case(inputs, grad.to(dtype), {"straight_through": 0.5, **options})


def gradients(given: Case, impl: str = "cpu", **options: object) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in given.inputs]
    torch.manual_seed(7)
    out = threshold_relative_attention(*leaves[:4], threshold=leaves[4], impl=impl, **{**given.options, **options})
    return [out.detach(), *torch.autograd.grad(out, leaves, given.grad.to(out.dtype))]


def exact(given: Case, visible: Tensor | None = None) -> list[Tensor]:
    """By autograd in double precision."""
    leaves = [x.detach().double().requires_grad_() for x in given.inputs]
    factor = None
    if "dropout" in given.options:
        torch.manual_seed(7)
        shape = (*given.inputs[0].shape[:3], given.inputs[1].shape[2])
        factor = dropout_factor(torch.randint(2**62, (1,)), shape, given.options["dropout"], torch.float64)
    temperature = given.options["straight_through"]
    out = straight_through_attention(*leaves, temperature, visible, dropout_factor=factor)
    return [out.detach(), *torch.autograd.grad(out, leaves, given.grad.double())]


def equal_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"straight_through": 0.05, "kv_heads": 4},
        {"straight_through": 3.0, "kv_heads": 1},
        {"queries": 1},
        {"queries": 41, "gate": 0.0},
        {"queries": 333, "keys": 333, "gate": 0.01, "batch": 1},
        {"dropout": 0.3},
        {"tolerance": 0.0, "gate": 5.0},
        {"scale": None, "width": 40},
    ],
    ids=str,
)
def test_gradients_are_those_of_autograd_through_the_dense_form(impl: str, shape: dict[str, object]) -> None:
    given = case(**shape)
    allowed = (
        8e-6 if impl == "triton" else 4e-6
    )  # strong gates: the reference in single precision has half of the former
    for name, right, ours in zip(NAMES, exact(given), gradients(given, impl), strict=True):
        assert_close(ours.double(), right, rtol=1e-4, atol=allowed * (1 + right.abs().max().item()), msg=name)


def test_reference_gradients_are_exact_in_double_precision() -> None:
    given = case(dropout=0.2, dtype=torch.float64)
    given = given._replace(inputs=tuple(x.double() for x in given.inputs))
    for right, ours in zip(exact(given), gradients(given, "reference"), strict=True):
        assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_padding_and_other_documents_have_no_part_in_gradients(impl: str) -> None:
    rng = torch.Generator().manual_seed(3)
    key_mask = torch.rand(2, 70, generator=rng) < 0.8
    segment_ids = torch.randint(3, (2, 70), generator=rng).sort(dim=1).values
    given = case(queries=63, keys=70, key_mask=key_mask, segment_ids=segment_ids)
    visible = key_mask[:, None, None] & (segment_ids[:, None, 7:, None] == segment_ids[:, None, None])
    for name, right, ours in zip(NAMES, exact(given, visible), gradients(given, impl), strict=True):
        assert_close(ours.double(), right, rtol=1e-4, atol=4e-6 * (1 + right.abs().max().item()), msg=name)


def test_a_row_that_keeps_nothing_learns_from_all_its_keys(impl: str) -> None:
    given = case()
    found = gradients(given, impl)
    empty = given.inputs[4] == 100.0
    assert (found[0][empty] == 0).all()
    warm = case(straight_through=50.0)  # so wide that even those far below the threshold have a slope
    assert (gradients(warm, impl)[1][empty].abs().amax(-1) > 0).sum() > empty.sum() / 2


@pytest.mark.parametrize("tolerance", [0.0, None])
def test_forward_has_the_same_bits_with_gradients_through_the_threshold(on_cpu: str, tolerance: float | None) -> None:
    query, key, value, log_gate, _ = case(queries=300, keys=311).inputs
    plain = threshold_relative_attention(query, key, value, log_gate, threshold=0.125, tolerance=tolerance, impl=on_cpu)
    for threshold in (0.125, torch.tensor(0.125), torch.full((4, 1), 0.125), torch.full((2, 4, 300), 0.125)):
        for through in (0.0, 0.5):
            for leaf in (query, query.clone().requires_grad_()):
                options = {"threshold": threshold, "straight_through": through, "tolerance": tolerance, "impl": on_cpu}
                out = threshold_relative_attention(leaf, key, value, log_gate, **options)
                assert equal_bits([out.detach()], [plain])


def test_a_threshold_for_each_row_keeps_what_that_number_keeps(impl: str) -> None:
    query, key, value, log_gate, threshold = case(batch=1, queries=21, keys=30).inputs
    whole = threshold_relative_attention(query, key, value, log_gate, threshold=threshold, impl=impl)
    for row in range(21):
        row_slice = slice(row, row + 1)
        for head in range(4):
            alone = threshold_relative_attention(
                *(query[:, :, row_slice], key[:, :, : row + 10], value[:, :, : row + 10], log_gate[:, :, row_slice]),
                threshold=threshold[0, head, row].item(),
                impl=impl,
            )
            assert_close(alone[:, head], whole[:, head, row_slice])


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")  # numpy in the interpreter
@pytest.mark.parametrize(
    "where, bad",
    [
        *product(("query", "threshold", "grad"), (math.nan, math.inf, -math.inf)),
        *product(("log_gate",), (math.nan, -math.inf)),  # a positive gate is an error
    ],
)
def test_what_is_not_finite_spoils_its_own_row_only(impl: str, where: str, bad: float) -> None:
    given = case(batch=1, heads=3, kv_heads=3, queries=20, keys=20)
    whole = gradients(given, impl)
    place = (0, 2, 11)
    tensors = dict(zip((*NAMES[1:], "grad"), (*given.inputs, given.grad), strict=True))
    tensors[where] = tensors[where].clone()
    tensors[where][place] = bad
    *inputs, grad = tensors.values()
    found = gradients(given._replace(inputs=tuple(inputs), grad=grad), impl)
    for name, clean, ours in zip(NAMES, whole, found, strict=True):
        if name in ("key", "value"):
            # The row has no part in them: as if its gradient were 0.
            without = given.grad.clone()
            without[place] = 0.0
            clean = gradients(given._replace(grad=without), impl)[NAMES.index(name)]
        elif name != "out" or where != "grad":
            assert ours[place].isnan().all(), name
            ours = ours.clone()
            ours[place] = clean[place]
        assert_close(ours, clean, msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_values_and_keys_spoil_no_row_that_leaves_them_out(impl: str, bad: float) -> None:
    given = case(heads=2, kv_heads=2, queries=40, keys=40)
    query, key, value, log_gate, threshold = given.inputs
    threshold[:, 1] = 0.125
    scores = query @ key.mT / 4
    keeps = (scores[0, 1, :, 9] > 0.125) & (torch.arange(40) >= 9)
    value = value.clone()
    value[0, 1, 9, 2] = bad
    out, dq, dk, dv, dg, dt = gradients(given._replace(inputs=(query, key, value, log_gate, threshold)), impl)
    assert 3 < keeps.sum() < 30
    for found in (out, dq, dg, dt):
        rows = found.isnan().flatten(3).any(-1) if found.dim() > 3 else found.isnan()
        assert torch.equal(rows[0, 1], keeps)
        assert not rows[1].any()
        assert not rows[0, 0].any()
    assert dk.isfinite().all()
    assert dv.isfinite().all()

    key = key.clone()
    key[1, 0, 4, 0] = bad
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 4] = False
    found = gradients(given._replace(inputs=(query, key, given.inputs[2], log_gate, threshold)), impl)
    padded = gradients(given, impl, key_mask=mask)
    for name, ours, right in zip(NAMES, found, padded, strict=True):
        heads = slice(0, 1)
        assert_close(ours[1, heads], right[1, heads], msg=name)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tolerance", [0.0, None])
def test_same_bits_for_any_number_of_threads(variant: str, masked: bool, tolerance: float | None) -> None:
    options: dict[str, object] = {"tolerance": tolerance, "dropout": 0.1}
    if masked:
        options["key_mask"] = torch.rand(2, 333) < 0.8
        options["segment_ids"] = torch.randint(4, (2, 333)).sort(dim=1).values
    given = case(queries=333, keys=333, width=24, **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = gradients(given)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert equal_bits(gradients(given), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("tolerance", [0.0, None])
def test_same_bits_alone_or_in_a_batch(variant: str, tolerance: float | None) -> None:
    given = case(batch=3, queries=150, keys=150, tolerance=tolerance)
    together = gradients(given)
    alone = gradients(given._replace(inputs=tuple(x[1:2] for x in given.inputs), grad=given.grad[1:2]))
    assert equal_bits([x[1:2] for x in together], alone)


@pytest.mark.parametrize("tolerance", [0.0, None])
def test_rows_have_the_same_bits_padded_or_not(variant: str, tolerance: float | None) -> None:
    length, whole = 240, 301
    given = case(queries=length, keys=length, tolerance=tolerance, score_bound=8.0)
    plain = gradients(given)
    places = torch.randperm(whole, generator=torch.Generator().manual_seed(2))[:length].sort().values
    padded = case(seed=1, queries=whole, keys=whole)
    for noise, part in zip((*padded.inputs, padded.grad), (*given.inputs, given.grad), strict=True):
        noise[:, :, places] = part
    mask = torch.zeros(2, whole, dtype=torch.bool)
    mask[:, places] = True
    others = torch.ones(whole, dtype=torch.bool)
    others[places] = False
    padded.grad[:, :, others] = 0.0  # rows of padding shall not add to the gradients of keys
    found = gradients(padded._replace(options={**given.options, "key_mask": mask}))
    for name, ours, right in zip(NAMES, found, plain, strict=True):
        if name in ("key", "value"):
            assert_close(ours[:, :, places], right, msg=name)
        else:
            assert equal_bits([ours[:, :, places]], [right])


def test_rows_stop_at_the_same_key_padded_or_not(variant: str) -> None:
    """Where the number of keys decides how far a row goes back for keys that it leaves out."""
    length, padding = 600, 200
    rng = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, length, 16, generator=rng) for _ in range(4))
    query, key = (torch.nn.functional.rms_norm(x, (16,)) for x in (query, key))
    inputs = (query, key, value, torch.full((1, 2, length), -0.1), torch.zeros(1, 2, length))
    plain = Case(inputs, grad, {"straight_through": 0.5, "tolerance": 1e-3, "score_bound": 4.0})

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(*tensor.shape[:2], padding, *tensor.shape[3:]), tensor], dim=2)

    mask = torch.arange(length + padding)[None] >= padding
    behind = Case(tuple(map(padded, inputs)), padded(grad), {**plain.options, "key_mask": mask})
    found, expected = gradients(behind), gradients(plain)
    assert equal_bits([x[:, :, padding:] for x in found], expected)
    whole = gradients(plain, tolerance=0.0)
    assert not equal_bits([whole[1]], [expected[1]])  # rows did stop


def test_a_bound_for_each_row_is_as_good_as_one_for_all(variant: str) -> None:
    given = case(queries=200, keys=230, tolerance=1e-4)
    one = gradients(given, score_bound=4.0)
    assert equal_bits(gradients(given, score_bound=torch.full((2, 4, 200), 4.0)), one)
    assert equal_bits(gradients(given, score_bound=torch.tensor(4.0)), one)
    query, key, value, log_gate, threshold = (x[:, :, -1:] if n in (0, 3, 4) else x for n, x in enumerate(given.inputs))
    for bound in (4.0, torch.full((2, 4, 1), 4.0)):
        options = {"score_bound": bound, "threshold": threshold, "tolerance": 1e-4, "impl": "cpu"}
        assert equal_bits([threshold_relative_attention(query, key, value, log_gate, **options)], [one[0][:, :, -1:]])


def test_rows_stop_by_their_own_bound_and_threshold(variant: str) -> None:
    """A value that is not finite shows which keys a row reads."""
    ones = torch.ones(1, 1, 200, 4)
    value = torch.randn(1, 1, 200, 5)
    value[0, 0, 150] = math.nan
    gate = torch.full((1, 1, 200), -0.5)
    bound, threshold = torch.full((1, 1, 200), 2.0), torch.zeros(1, 1, 200)
    bound[..., 1::4], bound[..., 2::4], threshold[..., 3::4] = 20.0, math.inf, -0.9
    for way in (slice(None), slice(199, None), slice(198, 199), slice(197, 198), slice(196, 197)):
        last = 200 if way.stop is None else way.stop
        out = threshold_relative_attention(
            *(ones[:, :, way], ones[:, :, :last], value[:, :, :last], gate[..., way]),
            threshold=threshold[..., way],
            score_bound=bound[..., way],
            tolerance=1e-2,
            scale=0.25,
            impl="cpu",
        )
        for row, spoilt in zip(range(200)[way], out.isnan().all(-1)[0, 0].tolist(), strict=True):
            # The least C with 2 exp(U - T) x / (1 - x) <= tolerance, x = exp(g C).
            odds = 1.001 * bound[0, 0, row].item() - threshold[0, 0, row].item() + math.log(200)
            reach = math.log1p(math.exp(min(odds, 100.0))) / 0.5
            assert spoilt == (0 <= row - 150 < math.ceil(reach))


def test_a_score_beyond_the_bound_of_its_row_is_an_error(on_cpu: str) -> None:
    query, key, value, log_gate, _ = case(queries=40, keys=40).inputs
    bound = (query @ key.repeat_interleave(2, 1).mT / 4).tril().amax(-1).clamp(min=0.25)
    threshold_relative_attention(query, key, value, log_gate, score_bound=bound, impl=on_cpu)
    bound[1, 2, 33] /= 2
    with pytest.raises(ValueError, match="score_bound must bound the absolute scores of all kept keys, got a tensor"):
        threshold_relative_attention(query, key, value, log_gate, score_bound=bound, impl=on_cpu)
    bound[1, 2, 33] = math.nan  # no bound
    threshold_relative_attention(query, key, value, log_gate, score_bound=bound, impl=on_cpu)


@pytest.mark.parametrize("size", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize("gate", [0.0, 1e-3, 100.0])
def test_any_gate_and_size_of_score_is_safe(variant: str, gate: float, size: float) -> None:
    given = case(queries=111, keys=111, gate=gate, straight_through=0.5 * size * size)
    query, key, value, log_gate, threshold = given.inputs
    threshold = threshold.where(threshold.abs() == 100.0, threshold * size * size)
    given = given._replace(inputs=(query * size, key * size, value, log_gate, threshold))
    for name, right, ours in zip(NAMES, exact(given), gradients(given), strict=True):
        allowed = (1e-2 if size > 1 else 1e-5) * (1 + right.abs().max().item())
        assert_close(ours.double(), right, rtol=1e-4, atol=allowed, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("gate", [1.0, 0.02])
def test_error_of_gradients_is_at_most_twice_that_of_the_reference_beside_large_values(
    variant: str, dtype: torch.dtype, temperature: float, gate: float
) -> None:
    """Values of mean 30 and keys of mean 1: gradients are small differences of products, and an error in what all
    keys of a row are compared with (delta) does not cancel."""
    rng = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 250, 64, generator=rng) for _ in range(4))
    log_gate = -gate * torch.exp(math.log(0.7) + 1.1 * torch.randn(1, 2, 250, generator=rng))
    tensors = [x.to(dtype) for x in (query, key + 1.0, value + 30.0)]
    given = Case((*tensors, log_gate, torch.zeros(1, 2, 250)), grad.to(dtype), {"straight_through": temperature})
    scores = given.inputs[0].double() @ given.inputs[1].double().mT / 8
    assert scores.abs().min() > 1e-6  # all agree on what is kept

    def found(impl: str, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = threshold_relative_attention(*leaves[:4], threshold=leaves[4], straight_through=temperature, impl=impl)
        return list(torch.autograd.grad(out, leaves if temperature else leaves[:4], given.grad.to(out.dtype)))

    double = tuple(x.double() for x in given.inputs)
    results = (found("reference", double), found("reference", given.inputs), found("cpu", given.inputs))
    for name, right, plain, ours in zip(NAMES[1 : 1 + len(results[0])], *results, strict=True):
        for norm in (2, math.inf):
            error, allowed = ((x.double() - right).norm(norm).item() for x in (ours, plain))
            assert error <= 2 * allowed, f"{name}: {error:.3g} > 2 x {allowed:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("values", ["one of 1e7", "a document of mean 300"])
def test_large_values_of_another_document_cost_no_precision(
    variant: str, dtype: torch.dtype, temperature: float, values: str
) -> None:
    rng = torch.Generator().manual_seed(0)
    length, first = 300, 100
    query, key, value, grad = (torch.randn(1, 1, length, 64, generator=rng).to(dtype) for _ in range(4))
    assert (query.double() @ key.double().mT / 8).abs().min() > 1e-7  # all agree on what is kept
    if values == "one of 1e7":
        value[:, :, 0] *= 1e7
    else:
        value[:, :, :first] += 300.0
    log_gate, document = torch.full((1, 1, length), -1.0), torch.arange(length)[None] >= first
    options = {"straight_through": temperature, "segment_ids": document.long()}

    def errors_behind(impl: str, right: list[Tensor]) -> list[float]:
        found = gradients_of((query, key, value), impl)
        return [(a.double() - b)[:, :, first:].norm().item() for a, b in zip(found, right, strict=True)]

    def gradients_of(tensors: tuple[Tensor, ...], impl: str) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out = threshold_relative_attention(*leaves, log_gate.to(out_type(leaves[0])), impl=impl, **options)
        return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))

    def out_type(tensor: Tensor) -> torch.dtype:
        return torch.promote_types(tensor.dtype, torch.float32)

    right = gradients_of((query.double(), key.double(), value.double()), "reference")
    for ours, plain in zip(errors_behind("cpu", right), errors_behind("reference", right), strict=True):
        assert ours <= 2 * plain


def strained(kind: str, length: int = 500) -> Case:
    """Rows that stop with much left behind them."""
    rng = torch.Generator().manual_seed(4)
    query, key, value, grad = (torch.randn(1, 2, length, 16, generator=rng) for _ in range(4))
    query, key = (torch.nn.functional.rms_norm(x, (16,)) for x in (query, key))
    log_gate = -torch.exp(math.log(0.7) + 1.1 * torch.randn(1, 2, length, generator=rng))
    if kind != "language":
        # Before the last hundred keys, all that are left out lie just below the threshold, where the slope is largest,
        # and all say the same: what rows neglect adds up. With rising scores, kept keys between them weigh as much as
        # they may.
        query, log_gate = torch.ones_like(query), torch.full_like(log_gate, -0.4)
        key = torch.full_like(key, -0.01)
        if kind == "rising":
            key[:, :, ::2] = torch.linspace(1.0, 0.01, length // 2)[:, None]
        key[:, :, -100:] = 0.01
        value, grad = value.abs(), grad.abs()
        value[:, :, : length - 100] *= -1.0
    return Case((query, key, value, log_gate, torch.zeros(1, 2, length)), grad, {"straight_through": 0.5})


@pytest.mark.parametrize("kind", ["language", "left out", "rising"])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-3])
def test_certificate_bounds_what_gradients_through_the_threshold_neglect(
    variant: str, kind: str, tolerance: float
) -> None:
    """The bounds of docs/exactness.md, by what autograd of the dense form finds."""
    given = strained(kind)
    query, key, value, log_gate, _ = (x.double() for x in given.inputs)
    largest = (given.grad.double() @ value.mT).abs().amax(-1)
    keys, slope = torch.arange(1.0, 501.0, dtype=torch.float64), 1 / (4 * 0.5)
    whole = exact(given)

    def neglected(by: float) -> list[Tensor]:
        stopped = gradients(given, tolerance=by, score_bound=4.0)
        return [(a - b).double() for a, b in zip(stopped, whole, strict=True)]

    def check(by: float) -> None:
        through = by * largest * (1 + slope * (1 + 2 * (1 + by) * (1 - log_gate) * keys))
        _, dq, dk, _, _, dt = neglected(by)
        rounding = 2e-5 * largest.max()
        scores = 3 * by * largest + through
        assert (dt.abs() <= through + rounding).all()
        assert (dq.norm(dim=-1) <= (scores + rounding) / 4 * key.norm(dim=-1).max()).all()
        assert dk.norm(dim=-1).sum() <= ((scores + rounding) / 4 * query.norm(dim=-1)).sum()

    check(tolerance)
    assert neglected(tolerance)[1].abs().max() > 0  # something was left out
    # Divided by the number of keys it bounds what all of them have together, whatever the data.
    check(tolerance / 500)
    assert (
        neglected(tolerance / 500)[5].abs() <= 2 * tolerance * largest * (1 - log_gate) + 2e-5 * largest.max()
    ).all()


def test_default_tolerance_is_indistinguishable_from_visiting_everything(variant: str) -> None:
    for kind in ("language", "left out", "rising"):
        given = strained(kind, 900)
        for name, right, default in zip(NAMES, exact(given), gradients(given), strict=True):
            assert_close(default.double(), right, rtol=1e-5, atol=1e-5 * right.abs().max().item(), msg=name)


def test_rows_stop_where_keys_that_are_left_out_no_longer_matter(variant: str) -> None:
    query, key, value, log_gate, threshold = strained("left out").inputs
    inputs = (query[:, :, -1:], key, value, log_gate[:, :, -1:], threshold[:, :, -1:])
    given = Case(inputs, torch.ones(1, 2, 1, 16), {"straight_through": 0.5, "score_bound": 0.05})
    # exp(g C) <= 2 temperature tolerance / keys, and at the latter tolerance a row would count more than there are.
    reach = math.ceil(math.log(500 / (2 * 0.5 * 1e-3)) / 0.4)
    for tolerance, read in ((1e-3, reach), (1e-16, 500)):
        grad_key = gradients(given, tolerance=tolerance)[2].abs().amax(-1)[0, 0]
        assert (grad_key != 0).tolist() == [key >= 500 - read for key in range(500)]


def _added_by_gradients(length: int) -> float:
    gradients(case(queries=50, keys=50))  # loads the kernel
    given = case(batch=1, heads=4, kv_heads=4, queries=length, keys=length, width=61, gate=2.0)
    given.inputs[4].zero_()
    return added_megabytes(lambda: gradients(given))


@pytest.mark.skipif(not measurable(), reason="peak memory is read from Linux's /proc")
def test_memory_is_linear_in_the_length() -> None:
    # Copies of the inputs, output and gradients are 115 MB; one matrix of one head would be 1,074 MB.
    assert 80 < in_fresh_process(_added_by_gradients, 16_384) < 200

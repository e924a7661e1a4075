"""What the operator does at its edges, as docs/kernel.md lists it: one answer from the reference and every variant."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.inputs import integer_inputs, random_inputs
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu


@pytest.fixture(params=["reference", "triton", *sorted(cpu.LIBRARIES)])
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param in ("reference", "triton"):
        return request.param
    monkeypatch.setattr(cpu, "variant", request.param)
    return "cpu"


def all_kept(length: int, gate: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every query keeps every key before it, all with a score of 1."""
    ones = torch.ones(1, 1, length, 4)
    return ones, ones / 2, torch.randn(1, 1, length, 5), torch.full((1, 1, length), gate)


def gradients(inputs: tuple[Tensor, ...], grad: Tensor, **options: object) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = threshold_relative_attention(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize(
    "bad, places",
    [
        (math.nan, (5, 60)),
        (math.nan, (20, 60)),
        (math.nan, (31, 33)),
        (math.nan, (7, 8, 9)),
        (math.inf, (7, 8, 9)),
        (-math.inf, (5, 60)),
    ],
)
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_every_bad_value_spoils_the_rows_that_keep_its_key(
    impl: str, bad: float, places: tuple[int, ...], tolerance: float | None
) -> None:
    query, key, value, gate = all_kept(64, -0.01)
    for place in places:
        value[0, 0, place, 2] = bad
    options = {"impl": impl, "tolerance": tolerance}
    rows = threshold_relative_attention(query, key, value, gate, **options).isnan().all(-1)[0, 0]
    assert rows.tolist() == [row >= min(places) for row in range(64)]
    decoded = [
        threshold_relative_attention(
            *(query[:, :, row : row + 1], key[:, :, : row + 1], value[:, :, : row + 1], gate[:, :, row : row + 1]),
            **options,
        ).isnan()
        for row in range(0, 64, 5)
    ]
    assert [bool(row.all()) for row in decoded] == rows[::5].tolist()


def test_values_without_components_give_gradients_of_zero(impl: str) -> None:
    inputs = random_inputs(queries=63, value_width=0, dtype=torch.float32)
    torch.full((1 << 22,), math.nan)  # what fresh memory may hold
    out, *grads = gradients(inputs, torch.empty(*inputs[0].shape[:3], 0), impl=impl)
    assert out.shape == (2, 4, 63, 0)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("bound", [None, 1.0])
@pytest.mark.parametrize("gate, tolerance", [(-1.0, None), (-0.3, 1e-2), (-0.3, 0.0), (0.0, 0.1)])
def test_a_bad_value_beyond_the_reach_of_a_row_spoils_it_not(
    impl: str, bound: float | None, gate: float, tolerance: float | None
) -> None:
    inputs = all_kept(111, gate)
    inputs[2][0, 0, 3] = math.nan
    out = threshold_relative_attention(*inputs, tolerance=tolerance, score_bound=bound, impl=impl)
    reach = math.inf
    if gate < 0 and tolerance != 0.0:
        # The least C with 2 exp(U - T) x / (1 - x) <= tolerance, x = exp(g C): U is 1 and a little, T is 0.
        odds = 1.001 + math.log(2 / (1.1920929e-7 if tolerance is None else tolerance))
        reach = math.ceil(math.log1p(math.exp(odds)) / -gate)
    assert out.isnan().all(-1)[0, 0].tolist() == [0 <= row - 3 < reach for row in range(111)]


@pytest.mark.parametrize("where", ["query", "value", "log_gate", "gradient", "score"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_gradients_of_nan_and_no_part_in_others(impl: str, where: str, bad: float) -> None:
    query, key, value, gate = integer_inputs(batch=1, length=33)
    grad = torch.randn(value.shape)
    if where == "query":
        query[0, 1, 20, 3] = bad
    elif where == "value":
        value[0, 1, 20] = bad
    elif where == "log_gate":
        gate[0, 1, 20] = -bad
    elif where == "gradient":
        grad[0, 1, 20, 3] = bad
    else:
        query[0, 1, 20], key[0, 1, 10] = 3e38, 3e38
    out, *grads = gradients((query, key, value, gate), grad, impl=impl)
    spoilt = out.isnan().any(-1) | ~grad.isfinite().all(-1)
    assert spoilt[0, 1, 20]
    assert not spoilt.all()
    grad_query, grad_key, grad_value, grad_gate = grads
    assert grad_query[spoilt].isnan().all()
    assert grad_gate[spoilt].isnan().all()
    # As if nothing had come in for these rows.
    clean = (
        *(query.masked_fill(spoilt[..., None], 0.0), key),
        *(value.nan_to_num(0.0, 0.0, 0.0), gate.masked_fill(spoilt, -1.0)),
    )
    expected = gradients(clean, grad.masked_fill(spoilt[..., None], 0.0), impl=impl)[1:]
    assert_close(grad_query[~spoilt], expected[0][~spoilt])
    assert_close(grad_gate[~spoilt], expected[3][~spoilt])
    assert_close(grad_key, expected[1])
    assert_close(grad_value, expected[2])


def test_a_gate_is_finite_if_the_precision_of_the_computation_can_hold_it(impl: str) -> None:
    query, key, value, _ = all_kept(9, 0.0)
    gate = torch.full((1, 1, 9), -0.5, dtype=torch.float64)
    clean = threshold_relative_attention(query, key, value, gate, impl=impl)
    gate[0, 0, 4] = -1e39
    out = threshold_relative_attention(query, key, value, gate, impl=impl)
    rows = torch.arange(9) != 4
    assert out[0, 0, 4].isnan().all()
    assert_close(out[:, :, rows], clean[:, :, rows])
    if impl == "reference":
        double = threshold_relative_attention(query.double(), key.double(), value.double(), gate, impl=impl)
        assert_close(double[0, 0, 4], value[0, 0, 4].double())  # the nearest key alone


def test_a_query_of_zeros_scores_zero_even_where_norms_overflow(impl: str) -> None:
    query, key, value, gate = all_kept(9, -0.5)
    out, *grads = gradients((0 * query, torch.full_like(key, 3e38), value, gate), value, threshold=-1.0, impl=impl)
    expected, *_, grad_value, grad_gate = gradients((0 * query, key, value, gate), value, threshold=-1.0, impl=impl)
    assert_close(out, expected)
    assert_close(grads[2], grad_value)
    assert_close(grads[3], grad_gate)


@pytest.mark.parametrize("tolerance", [1.0, 7.0, 1e300])
@pytest.mark.parametrize("gate", [-1e-3, -1.0, -1e38])
def test_no_tolerance_gives_the_nearest_kept_key_away(impl: str, tolerance: float, gate: float) -> None:
    inputs = all_kept(33, gate)
    value = torch.eye(33).reshape(1, 1, 33, 33)
    weights = threshold_relative_attention(*inputs[:2], value, inputs[3], tolerance=tolerance, impl=impl)[0, 0]
    assert_close(weights.sum(-1), torch.ones(33))
    assert (weights.diagonal() > 0).all()
    one = threshold_relative_attention(*inputs[:2], value, inputs[3], tolerance=1.0, impl=impl)[0, 0]
    assert torch.equal(weights, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{"scale": 1e39}, {"threshold": 1e39}, {"threshold": -1e39}], ids=str)
def test_scale_and_threshold_are_numbers_of_the_precision_of_the_computation(
    impl: str, dtype: torch.dtype, changes: dict[str, float]
) -> None:
    inputs = random_inputs(dtype=dtype)
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be a number that torch.float32 can hold, got"):
        threshold_relative_attention(*inputs, impl=impl, **changes)
    if impl == "reference":
        assert threshold_relative_attention(*random_inputs(), impl=impl, **changes).isfinite().all()


@pytest.mark.parametrize(
    "score, size, options",
    [
        (30.0, 1e30, {}),
        (30.0, 1e30, {"score_bound": 30.0}),
        (8.0, 1e35, {}),
        (8.0, 1e35, {"score_bound": 8.0}),
        (-35.0, 1e-30, {"threshold": -39.0}),
        (-35.0, 1e-30, {"threshold": -39.0, "score_bound": 39.0}),
        (-35.0, 1e35, {"threshold": -39.0}),
        (95.0, 1e35, {}),
        (1.0, 3e38, {"score_bound": 8.0}),
        (1.0, 1e-35, {"score_bound": 16.0}),
        (1.0, 1e-35, {"score_bound": 16.0, "threshold": -100.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_the_mean_of_values_of_any_size_is_of_their_size(
    impl: str, score: float, size: float, options: dict[str, object], tolerance: float | None
) -> None:
    if impl == "triton" and size > 1e38:
        pytest.skip("sums of such values overflow there, as docs/gpu.md says")
    query, key, value, gate = all_kept(63, -0.1)
    inputs = (query, key * score * torch.linspace(1.0, 0.9, 63)[:, None], value.clamp(-1, 1) * size, gate)
    options = {"tolerance": tolerance, **options}
    grad = torch.ones_like(value) / size
    exact = gradients(tuple(x.double() for x in inputs), grad.double(), impl="reference", **options)
    found = gradients(inputs, grad, impl=impl, **options)
    # Logits near 95 are rounded to 4e-6 before they are exponentiated. Gradients are sums of terms of these sizes.
    for ours, right, term in zip(found, exact, (size, abs(score), 1.0, 1.0 / size, 1.0), strict=True):
        assert_close(ours.double(), right, rtol=3e-5, atol=3e-5 * term)
    query, key, value, gate = inputs
    for row in (0, 31, 62):
        until = slice(row + 1)
        decoded = threshold_relative_attention(
            query[:, :, [row]], key[:, :, until], value[:, :, until], gate[:, :, [row]], impl=impl, **options
        )
        if impl == "cpu":
            assert torch.equal(decoded, found[0][:, :, [row]])
        assert_close(decoded[0, 0, 0].double(), exact[0][0, 0, row], rtol=3e-5, atol=3e-5 * size)


MESSAGE = r"score_bound must bound the absolute scores of all kept keys, got 8(\.0)? and a larger score"


@pytest.mark.parametrize("score", [9.0, 95.0, 3e38, -9.0, -95.0])
@pytest.mark.parametrize("queries", [1, 63])
def test_a_kept_score_beyond_the_bound_is_an_error(impl: str, score: float, queries: int) -> None:
    if impl == "triton":
        pytest.skip("a GPU is not asked whether the bound held: the answer would stall it")
    query, key, value, gate = all_kept(63, -0.01)
    inputs = query[:, :, -queries:], key * 8, value, gate[:, :, -queries:]
    options: dict[str, object] = {"score_bound": 8.0, "threshold": min(0.0, score - 1.0), "impl": impl}
    threshold_relative_attention(*inputs, **options)
    inputs[1][0, 0, 41] = score / 2
    with pytest.raises(ValueError, match=MESSAGE):
        threshold_relative_attention(*inputs, **options)


@pytest.mark.parametrize("queries", [1, 63])
def test_a_score_that_is_not_kept_may_lie_beyond_the_bound(impl: str, queries: int) -> None:
    query, key, value, gate = all_kept(63, -0.7)
    query, key = query.clone(), key * 8
    mask, segments = torch.ones(1, 63, dtype=torch.bool), torch.zeros(1, 63, dtype=torch.int64)
    mask[0, 50], segments[0, :20] = False, 1
    clean = key.clone()
    key[0, 0, 30] = -90.0  # below the threshold
    key[0, 0, 50] = 90.0  # padding
    key[0, 0, 19] = 90.0  # of another document for the rows after it, and those before it do not see it
    query[0, 0, 19] = 0.0
    query[0, 0, 50] = 0.0
    options = {"score_bound": 8.0, "key_mask": mask, "segment_ids": segments, "impl": impl}
    inputs = query[:, :, -queries:], key, value, gate[:, :, -queries:]
    out = threshold_relative_attention(*inputs, **options)
    rows = torch.arange(63)[-queries:] < 30
    expected = threshold_relative_attention(inputs[0], clean, *inputs[2:], **options)
    assert_close(out[:, :, rows], expected[:, :, rows])
    # Beyond a row's reach nobody looks.
    query, key, value, gate = all_kept(63, -1.0)
    key = key * 8
    key[0, 0, 0] = 5.0
    late = query[:, :, -min(queries, 10) :], key, value, gate[:, :, -min(queries, 10) :]
    assert threshold_relative_attention(*late, score_bound=8.0, impl=impl).isfinite().all()
    if impl != "triton":  # which does not look: the answer would stall a GPU
        with pytest.raises(ValueError, match=MESSAGE):
            threshold_relative_attention(*late, score_bound=8.0, tolerance=0.0, impl=impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_of_normalised_queries_and_keys_survives_their_rounding(impl: str, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    for width in (1, 2, 3, 64):
        vectors = torch.nn.functional.rms_norm(torch.randn(1, 1, 3000, width, generator=rng), (width,)).to(dtype)
        norms = vectors.double().norm(dim=-1)[0, 0]
        longest = vectors[:, :, [int(norms.argmax())] * 7]
        value, gate = torch.randn(1, 1, 7, 3).to(dtype), torch.full((1, 1, 7), -0.1)
        out = threshold_relative_attention(longest, longest, value, gate, score_bound=math.sqrt(width), impl=impl)
        assert out.isfinite().all()

"""What the operator computes, for every implementation: against loops, hand-worked cases and invariances."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.inputs import integer_inputs, random_inputs
from tests.ops.oracle import loop_attention
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS

LOG_HALF = math.log(0.5)

# An implementation is tested in the widest dtype it computes in; the reference in double.
DTYPE = {"reference": torch.float64}
TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 2e-5, "atol": 2e-6}}


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


def dtype_of(impl: str) -> torch.dtype:
    return DTYPE.get(impl, torch.float32)


def check(impl: str, inputs: tuple[Tensor, ...], **options: object) -> None:
    """Compare with the loops; scores of these inputs keep clear of the threshold by far more than rounding."""
    actual = threshold_relative_attention(*inputs, impl=impl, **options)
    expected = loop_attention(*inputs, **options)
    assert actual.dtype == inputs[0].dtype
    assert_close(actual.double(), expected, **TOLERANCE[inputs[0].dtype])


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"queries": 1},
        {"queries": 1, "keys": 63},
        {"queries": 5, "keys": 22},
        {"kv_heads": 2},
        {"kv_heads": 1, "queries": 3, "keys": 11},
        {"value_width": 3},
        {"value_width": 19},
        {"width": 1},
        {"batch": 1, "heads": 1, "queries": 111, "width": 5},
    ],
    ids=str,
)
def test_equals_direct_loops(impl: str, shape: dict[str, int]) -> None:
    check(impl, random_inputs(**shape, dtype=dtype_of(impl)))


def test_equals_direct_loops_with_masks_scale_and_threshold(impl: str) -> None:
    inputs = random_inputs(batch=3, kv_heads=2, queries=13, keys=21, dtype=dtype_of(impl))
    key_mask = torch.rand(3, 21) < 0.7
    key_mask[2] = False
    segment_ids = torch.randint(3, (3, 21)).sort(dim=1).values
    check(impl, inputs, key_mask=key_mask)
    check(impl, inputs, segment_ids=segment_ids)
    check(impl, inputs, key_mask=key_mask, segment_ids=segment_ids.int(), scale=0.7, threshold=0.25)
    check(impl, inputs, threshold=-0.4)
    check(impl, inputs, threshold=-100.0)


def test_integer_scores_with_ties_at_zero_equal_the_loops(impl: str) -> None:
    inputs = integer_inputs(dtype=dtype_of(impl))
    ties = (inputs[0] @ inputs[1].mT == 0).float().mean()
    assert ties > 0.1
    check(impl, inputs)
    check(impl, inputs, threshold=0.25)  # 0.25 = 1 / sqrt(16): a score of one unit lies exactly on it


def test_hand_worked_row(impl: str) -> None:
    # Scores of the last query: 1, -1, 2, 0. Kept: keys 0 and 2, at distances 2 and 1, gate one half.
    query = torch.ones(1, 1, 1, 1, dtype=dtype_of(impl))
    key = torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=dtype_of(impl)).reshape(1, 1, 4, 1)
    value = torch.tensor([8.0, 100.0, 2.0, 100.0], dtype=dtype_of(impl)).reshape(1, 1, 4, 1)
    log_gate = torch.full((1, 1, 1), LOG_HALF, dtype=dtype_of(impl))
    near, far = math.exp(2.0) / 2, math.exp(1.0) / 4
    out = threshold_relative_attention(query, key, value, log_gate, impl=impl)
    assert out.item() == pytest.approx((2.0 * near + 8.0 * far) / (near + far), rel=1e-6)


def test_gate_of_zero_forgets_nothing(impl: str) -> None:
    query = torch.ones(1, 1, 5, 1, dtype=dtype_of(impl))
    value = torch.arange(5.0, dtype=dtype_of(impl)).reshape(1, 1, 5, 1)
    out = threshold_relative_attention(query, query, value, torch.zeros(1, 1, 5, dtype=dtype_of(impl)), impl=impl)
    assert_close(out.flatten(), torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0], dtype=dtype_of(impl)))


def test_strong_gate_reads_the_nearest_kept_key_only(impl: str) -> None:
    query, key, value, log_gate = integer_inputs(batch=1, heads=1, length=40, dtype=dtype_of(impl))
    out = threshold_relative_attention(query, key, value, log_gate - 1000.0, impl=impl)
    kept = (query @ key.mT > 0)[0, 0].tril()
    for i in range(40):
        nearest = kept[i].nonzero().flatten().tolist()[-1:]
        expected = value[0, 0, nearest[0]] if nearest else torch.zeros(16, dtype=value.dtype)
        assert_close(out[0, 0, i], expected)


def test_row_that_keeps_no_key_is_exactly_zero_with_zero_gradients(impl: str) -> None:
    query, key, value, log_gate = random_inputs(queries=9, dtype=dtype_of(impl))
    query, key = query.abs(), key.abs()
    query[:, :, 4] *= -1
    leaves = [x.requires_grad_() for x in (query, key, value, log_gate)]
    out = threshold_relative_attention(*leaves, impl=impl)
    assert (out[:, :, 4] == 0).all()
    assert (out[:, :, 5] != 0).all()
    out.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert (query.grad[:, :, 4] == 0).all()
    assert (log_gate.grad[:, :, 4] == 0).all()


@pytest.mark.parametrize("batch, queries, keys", [(0, 5, 5), (2, 0, 0), (2, 0, 7), (0, 0, 0)])
def test_empty_inputs_give_empty_outputs_and_zero_gradients(impl: str, batch: int, queries: int, keys: int) -> None:
    leaves = [x.requires_grad_() for x in random_inputs(batch, 4, 2, queries, keys, dtype=dtype_of(impl))]
    out = threshold_relative_attention(*leaves, impl=impl)
    assert out.shape == (batch, 4, queries, 8)
    out.sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)


def test_padding_is_never_attended_and_never_counted(impl: str) -> None:
    query, key, value, log_gate = random_inputs(queries=11, dtype=dtype_of(impl))
    plain = threshold_relative_attention(query, key, value, log_gate, impl=impl)

    def padded(x: Tensor, left: int, right: int) -> Tensor:
        noise = [torch.rand_like(x[:, :, :1]).expand(*x.shape[:2], n, *x.shape[3:]) * 9 for n in (left, right)]
        return torch.cat([noise[0], x, noise[1]], dim=2)

    for left, right in ((5, 0), (0, 5), (3, 4)):
        mask = torch.zeros(2, left + 11 + right, dtype=torch.bool)
        mask[:, left : left + 11] = True
        gate = padded(log_gate[..., None], left, right)[..., 0].clamp(max=0.0)
        out = threshold_relative_attention(
            padded(query, left, right),
            padded(key, left, right),
            padded(value, left, right),
            gate,
            key_mask=mask,
            impl=impl,
        )
        assert_close(out[:, :, left : left + 11], plain)
        assert (out[:, :, :left] == 0).all()


def test_packed_documents_do_not_see_each_other(impl: str) -> None:
    first = random_inputs(batch=1, queries=7, dtype=dtype_of(impl), seed=1)
    second = random_inputs(batch=1, queries=12, dtype=dtype_of(impl), seed=2)
    packed = [torch.cat(pair, dim=2) for pair in zip(first, second, strict=True)]
    segment_ids = torch.tensor([[4] * 7 + [1] * 12])
    out = threshold_relative_attention(*packed, segment_ids=segment_ids, impl=impl)
    assert_close(out[:, :, :7], threshold_relative_attention(*first, impl=impl))
    assert_close(out[:, :, 7:], threshold_relative_attention(*second, impl=impl))


def test_permuting_the_batch_permutes_the_result(impl: str) -> None:
    inputs = random_inputs(batch=5, dtype=dtype_of(impl))
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = threshold_relative_attention(*(x[order] for x in inputs), impl=impl)
    assert_close(permuted, threshold_relative_attention(*inputs, impl=impl)[order])


def test_key_below_the_threshold_may_be_any_other_such_key(impl: str) -> None:
    query, key, value, log_gate = random_inputs(queries=20, dtype=dtype_of(impl))
    query = query.abs()
    key[:, :, 6] = -key[:, :, 6].abs()
    # A bound for both: computed from norms it would differ, and with it the rounding.
    options = {"tolerance": 0.0, "score_bound": 1000.0, "impl": impl}
    before = threshold_relative_attention(query, key, value, log_gate, **options)
    key[:, :, 6] = -torch.rand_like(key[:, :, 6]) * 50
    value[:, :, 6] = 1e6
    assert torch.equal(threshold_relative_attention(query, key, value, log_gate, **options), before)


def test_future_keys_change_nothing(impl: str) -> None:
    query, key, value, log_gate = random_inputs(queries=20, dtype=dtype_of(impl))
    before = threshold_relative_attention(query, key, value, log_gate, impl=impl)
    key[:, :, 12:], value[:, :, 12:] = 7.0, 1e6
    after = threshold_relative_attention(query, key, value, log_gate, impl=impl)
    assert torch.equal(after[:, :, :12], before[:, :, :12])


def test_decoding_gives_the_last_rows_of_the_full_result(impl: str) -> None:
    query, key, value, log_gate = random_inputs(queries=20, kv_heads=2, dtype=dtype_of(impl))
    full = threshold_relative_attention(query, key, value, log_gate, impl=impl)
    for new in (1, 6):
        part = threshold_relative_attention(query[:, :, -new:], key, value, log_gate[:, :, -new:], impl=impl)
        assert_close(part, full[:, :, -new:])


def test_non_contiguous_inputs_give_the_same_result(impl: str) -> None:
    inputs = random_inputs(dtype=dtype_of(impl))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not strided[0].is_contiguous()
    assert_close(threshold_relative_attention(*strided, impl=impl), threshold_relative_attention(*inputs, impl=impl))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_spoil_only_their_own_rows(impl: str, bad: float) -> None:
    inputs = random_inputs(batch=2, heads=2, queries=20, dtype=dtype_of(impl))
    query, key, value, log_gate = (x.clone() for x in inputs)
    clean = threshold_relative_attention(*inputs, impl=impl)

    query[0, 0, 5, 2] = bad
    out = threshold_relative_attention(query, key, value, log_gate, impl=impl)
    assert out[0, 0, 5].isnan().all()
    others = torch.ones(2, 2, 20, dtype=torch.bool)
    others[0, 0, 5] = False
    assert_close(out[others], clean[others])

    value[1, 1, 7, 3] = bad
    out = threshold_relative_attention(inputs[0], key, value, log_gate, impl=impl)
    keeps = (inputs[0] @ key.mT > 0).tril()[1, 1, :, 7]
    assert keeps.any()
    assert not keeps[7:].all()
    assert out[1, 1, keeps].isnan().all()
    assert_close(out[1, 1, ~keeps], clean[1, 1, ~keeps])
    assert_close(out[0], clean[0])

    key[1, 0, 4, 0] = bad
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 4] = False
    out = threshold_relative_attention(inputs[0], key, inputs[2], log_gate, impl=impl)
    masked = threshold_relative_attention(*inputs, key_mask=mask, impl=impl)
    assert_close(out[1, 0], masked[1, 0])
    assert_close(out[1, 1], clean[1, 1])


def test_unnormalised_scores_do_not_overflow(impl: str) -> None:
    query, key, value, log_gate = random_inputs(dtype=dtype_of(impl))
    check(impl, (query * 300, key * 300, value, log_gate))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_exact_up_to_its_own_rounding(impl: str, dtype: torch.dtype) -> None:
    query, key, value, log_gate = integer_inputs(dtype=dtype)
    out = threshold_relative_attention(query, key, value, log_gate.float(), impl=impl)
    assert out.dtype == dtype
    exact = loop_attention(query, key, value, log_gate.float())
    rounding = torch.finfo(dtype).eps
    # A GPU multiplies weights of the dtype, too, each of them rounded: by half of that at most.
    allowed = rounding / 2 * value.abs().max().item() if impl == "triton" else 1e-6
    assert_close(out.double(), exact, rtol=rounding, atol=allowed)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_removes_weights_at_its_rate_and_scales_the_rest(impl: str, dropout: float) -> None:
    length = 64
    query = torch.ones(8, 4, length, 1, dtype=dtype_of(impl))
    identity = torch.eye(length, dtype=dtype_of(impl)).expand(8, 4, length, length)
    inputs = (query, query, identity, torch.zeros(8, 4, length, dtype=dtype_of(impl)))
    weights = threshold_relative_attention(*inputs, impl=impl)
    dropped = threshold_relative_attention(*inputs, dropout=dropout, impl=impl)
    causal = torch.ones(length, length).tril().bool().expand_as(dropped)
    gone = (dropped == 0) & causal
    trials = int(causal.sum())
    sigma = math.sqrt(trials * dropout * (1 - dropout))
    assert abs(int(gone.sum()) - trials * dropout) < 4 * sigma
    assert_close(dropped[~gone], weights[~gone] / (1 - dropout))
    # Neither heads, nor rows, nor neighbouring keys share their fate.
    fate = gone.double() - dropout
    fate[~causal] = 0
    for pair in (fate[:, :1] * fate[:, 1:2], fate[..., 1:] * fate[..., :-1], fate[:, :, 1:] * fate[:, :, :-1]):
        used = int((pair != 0).sum())
        assert abs(pair.sum().item()) < 4 * dropout * (1 - dropout) * math.sqrt(used)


def test_dropout_follows_the_generator(impl: str) -> None:
    inputs = random_inputs(dtype=dtype_of(impl))
    torch.manual_seed(7)
    first = threshold_relative_attention(*inputs, dropout=0.3, impl=impl)
    second = threshold_relative_attention(*inputs, dropout=0.3, impl=impl)
    torch.manual_seed(7)
    assert torch.equal(threshold_relative_attention(*inputs, dropout=0.3, impl=impl), first)
    assert not torch.equal(first, second)

"""What every mechanism promises. A new one is tested by being in the table.

The file needs nothing of the other tests: copied beside a mechanism of your own, with a line above the first fixture
that puts it into the table, ``MECHANISMS["mine"] = Mine``, it tests that too (``pytest test_contract.py -k mine``).
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tra import Decoder, DecoderConfig
from tra.attention import MECHANISMS, Attention, Cache, Context, options_of
from tra.signatures import checked_options

WIDTH, HEADS, LENGTH = 32, 4, 19


@pytest.fixture(params=sorted(MECHANISMS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def mechanism(name: str) -> type[Attention]:
    return MECHANISMS[name]


@pytest.fixture(autouse=True, params=[torch.float64, torch.float32], ids=["double", "single"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Single precision reaches the fast kernels, double the references."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    single = actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5 if single else 1e-9, atol=1e-5 if single else 1e-9)


def build(mechanism: type[Attention], **options: object) -> Attention:
    return mechanism(WIDTH, HEADS, **options).eval()


def inputs(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_cache_changes_nothing(mechanism: type[Attention], kv_heads: int | None, qk_norm: bool) -> None:
    attention = build(mechanism, kv_heads=kv_heads, qk_norm=qk_norm)
    x = inputs()
    full = attention(x)
    for pieces in ([19], [1] * 19, [7, 1, 1, 10], [18, 1]):
        cache, parts = Cache(), []
        for piece in x.split(pieces, dim=1):
            parts.append(attention(piece, Context(cache)))
        assert_close(torch.cat(parts, dim=1), full)
        assert len(cache) == LENGTH


@torch.no_grad()
def test_later_tokens_change_nothing(mechanism: type[Attention]) -> None:
    attention, x = build(mechanism), inputs()
    before = attention(x)
    x[:, 11:] = 3.0
    assert_close(attention(x)[:, :11], before[:, :11])


@pytest.mark.parametrize("left, right", [(5, 0), (0, 4), (2, 3)])
@torch.no_grad()
def test_padding_changes_nothing(mechanism: type[Attention], left: int, right: int) -> None:
    attention, x = build(mechanism), inputs()
    padded = torch.cat([inputs(length=left, seed=1), x, inputs(length=right, seed=2)], dim=1)
    mask = torch.zeros(2, padded.shape[1], dtype=torch.bool)
    mask[:, left : left + LENGTH] = True
    out = attention(padded, Context(key_mask=mask))
    assert_close(out[:, left : left + LENGTH], attention(x))
    assert out.isfinite().all()


@torch.no_grad()
def test_padding_changes_nothing_with_a_cache(mechanism: type[Attention]) -> None:
    attention, x = build(mechanism), inputs()
    padded = torch.cat([inputs(length=6, seed=1), x], dim=1)
    mask = torch.ones(2, 25, dtype=torch.bool)
    mask[:, :6] = False
    cache, parts, seen = Cache(), [], 0
    for piece in padded.split([9, 1, 1, 14], dim=1):
        seen += piece.shape[1]
        parts.append(attention(piece, Context(cache, mask[:, :seen])))
    assert_close(torch.cat(parts, dim=1)[:, 6:], attention(x))


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(mechanism: type[Attention]) -> None:
    attention = build(mechanism)
    first, second = inputs(length=8, seed=1), inputs(length=11, seed=2)
    segment_ids = torch.tensor([[0] * 8 + [1] * 11] * 2)
    packed = attention(torch.cat([first, second], dim=1), Context(segment_ids=segment_ids))
    assert_close(packed[:, :8], attention(first))
    assert_close(packed[:, 8:], attention(second))


@torch.no_grad()
def test_weights_explain_the_output(mechanism: type[Attention]) -> None:
    attention, x = build(mechanism, dropout=0.5), inputs()
    weights = attention.weights(x)
    assert weights.shape == (2, HEADS, LENGTH, LENGTH)
    assert (weights.triu(1) == 0).all()
    value = attention.value(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    mixed = attention.postprocess(weights @ value)
    assert_close(attention.output(mixed.transpose(1, 2).flatten(2)), attention(x))


@torch.no_grad()
def test_weights_see_grouped_heads_and_masks(mechanism: type[Attention]) -> None:
    attention, x = build(mechanism, kv_heads=2), inputs()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[:, 3] = False
    weights = attention.weights(x, Context(key_mask=mask))
    assert weights.shape == (2, HEADS, LENGTH, LENGTH)
    assert (weights[..., 3] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_weights_are_exact_in_training_too(mechanism: type[Attention], masked: bool) -> None:
    attention, x = build(mechanism, dropout=0.5), inputs()
    segment_ids = torch.tensor([[0] * 8 + [1] * 11] * 2) if masked else None
    context = Context(segment_ids=segment_ids)
    expected, state = attention.weights(x, context), dict(vars(attention))
    attention.train()
    before = torch.get_rng_state()
    assert torch.equal(attention.weights(x, context), expected)
    assert torch.equal(torch.get_rng_state(), before)
    attention.eval()
    assert {name: value for name, value in vars(attention).items() if name in state} == state
    attention.train()
    exact = attention(x, Context(segment_ids=segment_ids, exact=True))
    assert torch.equal(exact, attention.eval()(x, Context(segment_ids=segment_ids, exact=True)))


@torch.no_grad()
def test_gates_are_one_for_each_head_and_token_and_each_token_decides_its_own(mechanism: type[Attention]) -> None:
    attention, x = build(mechanism), inputs()
    gates = attention.gates(x)
    if mechanism.gates is Attention.gates:
        assert gates is None
        return
    assert gates is not None
    assert gates.shape == (2, HEADS, LENGTH)
    assert ((gates > 0) & (gates < 1)).all()
    x[:, 7] = 3.0
    changed = (attention.gates(x) != gates).any(1)
    assert changed[:, 7].all()
    assert changed.sum() == 2


@torch.no_grad()
def test_a_cropped_cache_goes_on_as_if_nothing_had_been_forgotten(mechanism: type[Attention]) -> None:
    """Unless the mechanism says that it revises what it stored."""
    attention, cache, x = build(mechanism), Cache(), inputs()
    attention(x, Context(cache))
    cache.crop(11)
    rest = inputs(length=6, seed=1)
    expected = attention(torch.cat([x[:, :11], rest], dim=1))[:, 11:]
    error = (attention(rest, Context(cache)) - expected).abs().max()
    assert (error > 1e-3) if mechanism.revises_cache else (error < 1e-5)


def test_defaults_pass_the_checks_on_options(mechanism: type[Attention], dtype: torch.dtype) -> None:
    options = options_of(mechanism)
    defaults = {name: option.default for name, option in options.items()}
    assert {"qk_norm"} <= set(options)
    assert not {"layer", "dropout"} & set(options)
    checked = checked_options(options, defaults, "attention_options", "it")
    assert checked == defaults
    torch.manual_seed(3)
    plain = mechanism(WIDTH, HEADS, layer=2).state_dict()
    torch.manual_seed(3)
    told = mechanism(WIDTH, HEADS, layer=2, **checked).state_dict()
    assert all(torch.equal(plain[name], told[name]) for name in plain)


@pytest.mark.parametrize("around", ["nothing", "another device", "inference mode"])
def test_a_config_is_made_without_drawing_or_keeping_anything(name: str, around: str) -> None:
    contexts = {
        "nothing": torch.enable_grad(),
        "another device": torch.device("meta"),
        "inference mode": torch.inference_mode(),
    }
    before = torch.get_rng_state()
    with contexts[around]:
        config = DecoderConfig(vocabulary=5, layers=2, heads=HEADS, width=WIDTH, attention=name)
    assert torch.equal(torch.get_rng_state(), before)
    model = Decoder(config)
    assert [block.attention.layer for block in model.blocks] == [0, 1]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_every_parameter_gets_a_finite_gradient_beside_padding(mechanism: type[Attention]) -> None:
    attention, x = build(mechanism).train(), inputs()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :4] = False
    attention(x, Context(key_mask=mask)).square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_dropout_acts_in_training_only(mechanism: type[Attention]) -> None:
    attention, x = build(mechanism, dropout=0.5), inputs()
    assert torch.equal(attention(x), attention(x))
    attention.train()
    assert not torch.equal(attention(x), attention(x))


def test_runs_in_half_precision_under_autocast(mechanism: type[Attention]) -> None:
    attention, x = build(mechanism).float(), inputs().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(x)
    expected = attention(x)
    error = (out.float() - expected).abs()
    # Most entries, since a score near a threshold may fall on its other side.
    assert error.flatten().quantile(0.9) < 0.05 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32], ids=["single"], indirect=True)  # compiling takes seconds
def test_compiles_without_graph_breaks(name: str, mechanism: type[Attention]) -> None:
    torch._dynamo.reset()  # each compiled mechanism counts against one limit on recompilations
    attention = build(mechanism)
    # Machine code is made for the operator of this package alone, of one threshold and of each row's: that of PyTorch's
    # own is not ours to test.
    backend = "inductor" if name in ("tra", "tra-learned") else "aot_eager"
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 14):
        x = inputs(length=length)
        assert_close(compiled(x), attention(x))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"width": 30}, r"width must be a multiple of heads \(4\), got 30"),
        ({"kv_heads": 3}, r"kv_heads must divide heads \(4\), got 3"),
        ({"dropout": 1.0}, r"dropout must be a probability in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_argument_is_named(mechanism: type[Attention], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mechanism(**{"width": WIDTH, "heads": HEADS, **options})


def test_wrong_mask_is_named_and_leaves_the_cache_as_it_was(mechanism: type[Attention]) -> None:
    attention, cache = build(mechanism), Cache()
    with torch.no_grad():
        attention(inputs(), Context(cache))
        new = inputs(length=1, seed=1)
        for wrong, message in (
            ({"key_mask": torch.ones(2, 1, dtype=torch.bool)}, r"key_mask must have the shape \[B, Lk\] = \[2, 20\]"),
            ({"key_mask": torch.ones(2, 20)}, "key_mask must be boolean"),
            ({"segment_ids": torch.ones(3, 20).long()}, r"segment_ids must have the shape"),
            ({"segment_ids": torch.ones(2, 20)}, "segment_ids must be int32 or int64"),
        ):
            with pytest.raises(ValueError, match=message):
                attention(new, Context(cache, **wrong))
        assert len(cache) == LENGTH
        full = attention(torch.cat([inputs(), new], dim=1))
        assert_close(attention(new, Context(cache)), full[:, -1:])


def test_gradients_reach_what_is_cached(mechanism: type[Attention]) -> None:
    """In pieces as in one pass, whichever of them needs the other."""
    attention, x = build(mechanism), inputs().requires_grad_()
    expected = torch.autograd.grad(attention(x)[:, 12:].square().sum(), [x, *attention.parameters()])
    cache = Cache()
    parts = [attention(piece, Context(cache)) for piece in x.split([9, 3, 1, 6], dim=1)]
    found = torch.autograd.grad(torch.cat(parts, dim=1)[:, 12:].square().sum(), [x, *attention.parameters()])
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    # What was remembered with gradients can be gone on from without, and still be differentiated afterwards.
    cache, first = Cache(), x[:, :9]
    before = attention(first, Context(cache))
    if not mechanism.revises_cache:
        cache.crop(5)
        with torch.no_grad():
            assert_close(attention(x[:, 5:7], Context(cache)), attention(x[:, :7])[:, 5:])
    before.sum().backward()


@torch.no_grad()
def test_weights_with_a_cache_are_the_last_rows_and_leave_it_alone(mechanism: type[Attention]) -> None:
    attention, x, cache = build(mechanism, kv_heads=2), inputs(), Cache()
    attention(x[:, :11], Context(cache))
    expected = attention.weights(x)[:, :, 11:]
    assert_close(attention.weights(x[:, 11:], Context(cache)), expected)
    assert len(cache) == 11
    assert_close(attention(x[:, 11:], Context(cache)), attention(x)[:, 11:])


def test_a_cache_is_of_one_batch(mechanism: type[Attention]) -> None:
    attention, cache = build(mechanism), Cache()
    with torch.no_grad():
        attention(inputs(), Context(cache))
        with pytest.raises(ValueError, match="cache holds a batch of 2, got new tokens for a batch of 3"):
            attention(inputs(batch=3), Context(cache))

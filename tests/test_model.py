import pytest
import torch
from torch.testing import assert_close

from tra import MECHANISMS, Decoder, DecoderConfig, sized
from tra.attention import Context


def small(attention: str = "tra", dtype: torch.dtype = torch.float64, **changes: object) -> Decoder:
    config = DecoderConfig(vocabulary=11, layers=2, heads=4, width=32, attention=attention, **changes)
    return Decoder(config).to(dtype).eval()


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "size, attention, expected",
    [
        ("mini", "tra", 2_637_072),  # the authors' code
        ("mini", "rope", 2_637_072 - 4 * (256 * 4 + 4)),  # less the gates
        ("medium", "tra", 72_500_800),
        ("medium", "rope", 72_500_800 - 8 * (512 * 8 + 8)),
    ],
)
def test_parameter_counts(size: str, attention: str, expected: int) -> None:
    with torch.device("meta"):
        assert parameters(Decoder(sized(size, attention=attention))) == expected


def test_state_dict_names_explain_themselves() -> None:
    names = set(small().state_dict())
    block = {
        "attention_norm.weight",
        "attention.query.weight",
        "attention.key.weight",
        "attention.value.weight",
        "attention.gate.weight",
        "attention.gate.bias",
        "attention.output.weight",
        "attention.output.bias",
        "mlp_norm.weight",
        "mlp.expand.weight",
        "mlp.expand.bias",
        "mlp.contract.weight",
        "mlp.contract.bias",
    }
    expected = {"embedding.weight", "norm.weight", "head.weight"}
    assert names == expected | {f"blocks.{layer}.{name}" for layer in range(2) for name in block}


def test_initialisation_is_the_papers() -> None:
    model = Decoder(sized("mini", vocabulary=500))
    assert model.embedding.weight.abs().max() <= 0.01
    assert model.embedding.weight.std().item() == pytest.approx(0.02 / 12**0.5, rel=0.02)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.02)


@torch.no_grad()
def test_residual_is_added_to_the_normalised_stream_or_to_the_stream() -> None:
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    for residual in ("normalised", "pre_norm"):
        block = small(residual=residual).blocks[0]

        def norm(y: torch.Tensor) -> torch.Tensor:
            return y / (y.square().mean(-1, keepdim=True) + torch.finfo(y.dtype).eps).sqrt()

        base = norm(x) if residual == "normalised" else x
        middle = base + block.attention(norm(x))
        value, gate = block.mlp.expand(norm(middle)).chunk(2, dim=-1)
        end = norm(middle) if residual == "normalised" else middle
        expected = end + block.mlp.contract(value * gate * torch.sigmoid(gate))
        assert_close(block(x, Context()), expected)


@pytest.mark.parametrize("attention", sorted(MECHANISMS))
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@torch.no_grad()
def test_prefill_in_pieces_and_decoding_equal_the_full_forward(
    attention: str, batch: int, padded: bool, dtype: torch.dtype
) -> None:
    model = small(attention, dtype, kv_heads=2)
    tokens = torch.randint(11, (batch, 23))
    mask = None
    if padded:
        mask = torch.arange(23) >= torch.arange(batch)[:, None] * 3 + 2
    full = model(tokens, key_mask=mask)
    for pieces in ([23], [9, 6, 8], [12] + [1] * 11, [1] * 23):
        cache, parts, seen = model.new_cache(), [], 0
        for piece in tokens.split(pieces, dim=1):
            seen += piece.shape[1]
            parts.append(model(piece, cache=cache, key_mask=None if mask is None else mask[:, :seen]))
        assert_close(torch.cat(parts, dim=1), full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", sorted(MECHANISMS))
@torch.no_grad()
def test_left_padding_does_not_change_the_real_tokens(attention: str) -> None:
    model = small(attention)
    tokens = torch.randint(11, (3, 12))
    padded = torch.cat([torch.randint(11, (3, 5)), tokens], dim=1)
    mask = (torch.arange(17) >= 5).expand(3, 17)
    assert_close(model(padded, key_mask=mask)[:, 5:], model(tokens))


@pytest.mark.parametrize("attention", ["tra", "rope", "cope"])  # the operator, SDPA, dense; each takes long to compile
def test_compiles_and_trains_without_graph_breaks(attention: str) -> None:
    torch._dynamo.reset()
    model = small(attention, dropout=0.1).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (9, 13):
        compiled(torch.randint(11, (2, length))).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval()
    tokens = torch.randint(11, (2, 9))
    assert_close(compiled(tokens), model(tokens))


@torch.no_grad()
def test_kernel_in_the_model_equals_the_reference_in_double_precision() -> None:
    """The module's bound on the scores and its tolerance are right where the kernel relies on them."""
    double = small()
    single = small(dtype=torch.float32)
    single.load_state_dict(double.state_dict())
    tokens = torch.randint(11, (2, 400))
    error = (single(tokens).double() - double(tokens)).abs()
    # All but the few positions after a score so near 0 that rounding decides its sign. (The norms' epsilon depends on
    # the dtype, which costs 1e-5.)
    assert error.flatten().quantile(0.97) < 2e-4


@torch.no_grad()
def test_dropout_acts_on_embedding_and_mlp_too() -> None:
    model = small(dropout=0.5)
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    for module in (model.dropout, model.blocks[0].mlp):
        assert torch.equal(module(x), module(x))
        module.train()
        assert not torch.equal(module(x), module(x))


@torch.no_grad()
def test_attention_weights_of_every_layer() -> None:
    model = small(dropout=0.5).train()
    weights = model.attention_weights(torch.randint(11, (2, 9)))
    assert [tuple(layer.shape) for layer in weights] == [(2, 4, 9, 9)] * 2
    total = weights[0].sum(-1)
    assert ((total - 1).abs() < 1e-9).logical_or(total == 0).all()
    assert model.training
    assert model.blocks[0].attention.training


@torch.no_grad()
def test_attention_weights_under_masks_are_those_of_the_forward_pass() -> None:
    model = small("rope")
    tokens = torch.randint(11, (2, 9))
    key_mask = torch.arange(9).expand(2, 9) >= torch.tensor([[0], [3]])
    weights = model.attention_weights(tokens, key_mask=key_mask)
    normed = model.blocks[0].attention_norm(model.embedding(tokens))
    assert torch.equal(weights[0], model.blocks[0].attention.weights(normed, Context(key_mask=key_mask)))
    assert (weights[1][1, ..., :3] == 0).all()
    segment_ids = torch.tensor([[0] * 4 + [1] * 5] * 2)
    apart = model.attention_weights(tokens, segment_ids=segment_ids)
    assert (apart[1][..., 4:, :4] == 0).all()


@torch.no_grad()
def test_hidden_from_embedded_tokens_and_what_each_block_reads() -> None:
    model = small("tra")
    tokens = torch.randint(11, (2, 9))
    streams: list[torch.Tensor] = []
    hidden = model.hidden_from(model.embedding(tokens), streams=streams)
    assert torch.equal(hidden, model.hidden(tokens))
    assert torch.equal(streams[0], model.embedding(tokens))
    assert torch.equal(streams[1], model.blocks[0](streams[0], Context()))
    assert len(streams) == 2


@pytest.mark.parametrize("attention", sorted(MECHANISMS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_checkpointed_blocks_give_the_same_gradients_with_dropout(attention: str, dtype: torch.dtype) -> None:
    model = small(attention, dtype, dropout=0.3).train()
    tokens = torch.randint(11, (2, 21))
    gradients = []
    for model.checkpoint_blocks in (False, True):
        torch.manual_seed(7)
        model.zero_grad()
        model(tokens).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_checkpointed_blocks_run_again_in_training_only() -> None:
    model, tokens, calls = small().train(), torch.randint(11, (2, 9)), []
    model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    model.checkpoint_blocks = True
    model(tokens).sum().backward()
    assert len(calls) == 2
    calls.clear()
    with torch.no_grad():
        model(tokens)
    model.eval()(tokens).sum().backward()
    assert len(calls) == 2


def test_checkpointed_blocks_keep_fewer_tensors() -> None:
    model, tokens = small().train(), torch.randint(11, (2, 50))
    kept = []
    for model.checkpoint_blocks in (False, True):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            model(tokens)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention": "ropee"}, "attention must be one of .*, got 'ropee'; did you mean 'rope'?"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"vocabulary": 0}, "vocabulary must be at least 1, got 0"),
        ({"residual": "post"}, "residual must be 'normalised' or 'pre_norm', got 'post'"),
    ],
)
def test_wrong_config_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sized("mini", **changes)


def test_misspelt_size_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="size must be one of medium, mini, got 'minni'; did you mean 'mini'"):
        sized("minni")
